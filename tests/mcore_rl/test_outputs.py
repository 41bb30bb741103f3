"""What a run leaves behind: each step once, whole files, pictures, and a summary a person can read."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mcore_rl.outputs import METRIC_KEYS, MetricsWriter, SamplesWriter, read_metrics
from mcore_rl.plots import moving_mean, write_plots
from mcore_rl.progress import Progress, bars, curve, duration, print_summary, step_line
from parallel.errors import UserError


def metrics(step: int) -> dict[str, Any]:
    return {key: step + 0.1 for key in METRIC_KEYS if key != "step"} | {"reward/mean": min(0.1 * step, 1.0), "reward/std": 0.2}


def test_a_resumed_run_has_each_step_once_bit_for_bit(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    writer = MetricsWriter(whole, tensorboard=False)
    for step in range(1, 7):
        writer.write(step, metrics(step))
    writer = MetricsWriter(cut, tensorboard=False)
    for step in range(1, 6):
        writer.write(step, metrics(step))
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # killed while writing
    assert [r["step"] for r in read_metrics(cut)] == [1, 2, 3, 4, 5]
    writer = MetricsWriter(cut, tensorboard=False)
    writer.truncate_after(4)
    for step in (5, 6):
        writer.write(step, metrics(step))
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="written once"):
        writer.write(6, metrics(6))


def test_a_torn_line_is_mended_even_without_a_truncation(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"step": 2')
    MetricsWriter(tmp_path, tensorboard=False).write(2, {"a": 2})
    assert [r["a"] for r in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(UserError, match="metrics.jsonl:1 is not JSON"):
        read_metrics(tmp_path)


def test_tensors_and_values_that_are_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    MetricsWriter(tmp_path, tensorboard=False).write(1, {"a": torch.tensor(0.5), "b": float("nan"), "c": 3})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "b": None, "c": 3}] and "not finite, written as null: b" in caplog.text


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 4), (3, 5)):
        writer = MetricsWriter(tmp_path)
        writer.truncate_after(first - 1)
        for step in range(first, last + 1):
            writer.write(step, {"actor/loss": float(step * first)})
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(1, 1.0), (2, 2.0), (3, 9.0), (4, 12.0), (5, 15.0)]


def test_wandb_is_refused_where_missing_and_continued_where_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        MetricsWriter(tmp_path / "none", wandb=True)
    assert not (tmp_path / "none").exists()
    calls: list[Any] = []
    run = types.SimpleNamespace(id="abc", log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **given: calls.append(given["id"]) or run))
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, tensorboard=False, wandb=True)
        writer.write(step, {"a": 1.0})
        writer.close()
    assert calls == [None, (1, {"a": 1.0}), "end", "abc", (2, {"a": 1.0}), "end"]


def test_samples_are_bounded_whole_and_checked(tmp_path: Path) -> None:
    sample = dict(prompt="1+1=", response="2 \u2028é", tokens=torch.tensor([1, 2]), mask=(0, 1), reward=1.0, version=[0, 0], group=3)
    path = SamplesWriter(tmp_path, per_step=2).write(7, [sample] * 5)
    assert path == tmp_path / "samples/step_000007.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    assert len(lines) == 2 and lines[0] == sample | {"tokens": [1, 2], "mask": [0, 1]}
    assert SamplesWriter(tmp_path, per_step=0).write(8, [sample]) is None and not (tmp_path / "samples/step_000008.jsonl").exists()
    writer = SamplesWriter(tmp_path, per_step=None)
    assert len(writer.write(9, [sample] * 40).read_text(encoding="utf-8").strip().split("\n")) == 40
    with pytest.raises(ValueError, match="lacks reward"):
        writer.write(10, [{k: v for k, v in sample.items() if k != "reward"}])
    writer.truncate_after(7)
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["step_000007.jsonl"]


def test_plots_are_drawn_from_what_is_there(tmp_path: Path) -> None:
    assert write_plots(tmp_path) == []
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(0, {"eval/greedy": 0.3})
    assert [p.name for p in write_plots(tmp_path)] == ["evaluation.png"]
    for step in range(1, 9):
        writer.write(step, metrics(step))
    files = write_plots(tmp_path)
    assert [p.stem for p in files] == ["reward", "evaluation", "kl", "lengths", "phase_times"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in files)
    assert moving_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_progress_is_plain_lines_elsewhere_and_redrawn_on_a_terminal() -> None:
    plain = Console(file=io.StringIO(), force_terminal=False, width=80)
    with Progress(steps=3, console=plain) as progress:
        progress.phase("rollout")
        progress.step(1, metrics(1))
        progress.note("[checkpoint] written")
    lines = plain.file.getvalue().splitlines()
    assert lines == [step_line(1, 3, metrics(1)), "[checkpoint] written"] and "\x1b" not in lines[0]
    assert "reward 0.100" in lines[0] and "tokens/s 1" in lines[0] and "rollout 1.10 s" in lines[0]
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress(steps=3, console=terminal) as progress:
        progress.phase("update")
        progress.step(1, metrics(1))
    shown = terminal.file.getvalue()
    assert "step 1/3" in shown and "\x1b" in shown


def test_summary_names_curve_answers_files_and_the_next_command(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(0, 21):
        writer.write(step, {"reward/mean": step / 20} if step else {"eval/greedy": 0.25})
    console = Console(file=io.StringIO(), width=100)
    one, other = dict(prompt="[b]1+1=", response="3", reward=0.0), dict(prompt="[b]1+1=", response="2", reward=1.0)
    print_summary(tmp_path, "mcore-rl train c.yaml run.steps=40", [one], [other], console)
    text = console.file.getvalue()
    for words in ("▁", "█", "first 5 steps 0.150, last 10 steps 0.775", "eval/greedy", "[b]1+1=", "3  (0)", "2  (1)", "metrics.jsonl",
                  "mcore-rl train c.yaml run.steps=40"):
        assert words in text
    print_summary(tmp_path / "absent", "again", console=console)


def test_numbers_in_words() -> None:
    assert bars([0, 0.5, 1]) == "▁▅█" and bars([]) == "" and bars([2.0, 2.0]) == "▁▁"
    assert curve([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0] and curve([]) == []
    assert [duration(s) for s in (8, 200, 7500)] == ["8 s", "3 min 20 s", "2 h 05 min"]
