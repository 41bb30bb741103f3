"""Killed at a random moment, the same command resumes by itself and the run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Launched, wait_for
from tests.runs import read_metrics, values, write_run

STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A run of two ranks (TP2 actor, TP2 engine, evaluation, cosine schedule) that nobody disturbs."""
    directory = tmp_path_factory.mktemp("whole")
    config = write_run(
        directory, run={"steps": STEPS}, actor={"parallel": {"tp": 2}, "optimizer": {"schedule": "cosine", "warmup_steps": 2}},
        rollout={"tp": 2}, checkpoint={"every": 2, "keep": 2}, evaluation={"data": "builtin:addition-held-out", "every": 3, "max_prompts": 6})
    run = Launched(directory / "log", "train", str(config), f"run.dir={directory}/whole")
    assert run.finish() == 0, (directory / "log").read_text()[-3000:]
    rows = read_metrics(directory / "whole")
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1))
    return config, rows


def kill(run: Launched, target: str, chance: random.Random) -> None:
    pids = {"rank": lambda: [chance.choice(run.ranks())], "launcher": lambda: [run.process.pid], "all": run.pids}[target]()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def killed_and_resumed(uninterrupted: tuple[Path, list[dict[str, Any]]], directory: Path, target: str, seed: int) -> None:
    config, want = uninterrupted
    chance = random.Random(seed)
    command = ("train", str(config), f"run.dir={directory}/run")
    run = Launched(directory / "log", *command)
    try:
        metrics = directory / "run" / "metrics.jsonl"
        lines = chance.randrange(0, STEPS - 1)
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= lines, f"{lines} steps")
        time.sleep(chance.random() * 0.6)
        kill(run, target, chance)
        wait_for(lambda: not run.pids(), f"after killing {target}: all processes gone", 60)
        before = metrics.read_bytes()
        time.sleep(0.5)
        assert metrics.read_bytes() == before, "an orphan kept writing"
    finally:
        run.end()
    again = Launched(directory / "log", *command)
    try:
        assert again.finish() == 0, (directory / "log").read_text()[-3000:]
    finally:
        again.end()
    got = read_metrics(directory / "run")
    assert [r["step"] for r in got] == [r["step"] for r in want]
    for a, b in zip(got, want, strict=True):
        assert values(a) == values(b), f"step {a['step']} differs after killing {target} (seed {seed})"


def test_the_launcher_alone_is_killed(uninterrupted: Any, tmp_path: Path) -> None:
    killed_and_resumed(uninterrupted, tmp_path, "launcher", 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 4))
@pytest.mark.parametrize("target", ["rank", "launcher", "all"])
def test_any_process_is_killed_at_a_random_moment(uninterrupted: Any, tmp_path: Path, target: str, seed: int) -> None:
    killed_and_resumed(uninterrupted, tmp_path, target, seed)


def test_a_second_start_in_the_same_directory_is_refused(uninterrupted: Any, tmp_path: Path) -> None:
    config, _ = uninterrupted
    metrics = tmp_path / "run" / "metrics.jsonl"
    first = Launched(tmp_path / "first", "train", str(config), f"run.dir={tmp_path}/run", "run.steps=100000")
    try:
        wait_for(metrics.exists, "the first run")
        second = Launched(tmp_path / "second", "train", str(config), f"run.dir={tmp_path}/run", "run.lease_wait_s=0")
        assert second.finish() != 0
        text = (tmp_path / "second").read_text()
        assert "mcore-rl: error:" in text and str(tmp_path / "run") in text and "process" in text
        lines = metrics.read_text().count("\n")
        wait_for(lambda: metrics.read_text().count("\n") > lines, "the first run goes on")
    finally:
        first.end()
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == list(range(1, len(read_metrics(tmp_path / "run")) + 1))
