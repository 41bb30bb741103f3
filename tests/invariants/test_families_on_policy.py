"""On-policy truth (invariant 3) for families with experts, latent attention and sinks: trainer and engine cut over expert-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models import write_model
from tests.runs import run_training, write_run
from tests.worker_pool import run_ranks

SIZES = ["actor.parallel.tp=2", "actor.parallel.sequence_parallel=true", "actor.parallel.ep=2", "actor.parallel.etp=1", "rollout.tp=2", "run.steps=2"]


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_every_step_starts_on_policy(family: str, tmp_path: Path) -> None:
    rows, _ = run_ranks(2, run_training, str(write_run(tmp_path, family)), [*SIZES, "rollout.moe_ep=2"])[0]
    assert len(rows) == 2
    for row in rows:
        assert row["actor/log_prob_gap_max"] < 1e-4 and row["actor/ratio_max_deviation"] < 1e-4 and abs(row["actor/kl_to_old"]) < 1e-6
        assert row["actor/grad_norm"] > 0 and row["weights/version"] == row["step"]


def test_a_run_with_an_fp8_engine_reports_the_gap_of_its_rounding(tmp_path: Path) -> None:
    """The gap has no automatic gate, for it is the rounding's; the update's ratio is the trainer's own and stays at 1."""
    config = str(write_run(tmp_path, "qwen3_moe"))
    vocabulary = json.loads((tmp_path / "model/config.json").read_text())["vocab_size"]
    write_model(tmp_path / "model", "qwen3_moe", vocab_size=vocabulary, hidden_size=128, head_dim=64, num_key_value_heads=4,
                moe_intermediate_size=128, num_hidden_layers=2)
    rows, _ = run_ranks(1, run_training, config, ["rollout.fp8=true", "run.steps=2"])[0]
    for row in rows:
        assert 1e-3 < row["actor/log_prob_gap_max"] < 5 and row["actor/ratio_max_deviation"] < 1e-4


@pytest.mark.parametrize(("world", "layout"), [(1, []), (2, ["actor.parallel.tp=2"]), (2, ["actor.parallel.cp=2"])])
def test_training_in_fp8_is_on_policy_with_an_fp8_engine_and_training_without_is_not(world: int, layout: list[str], tmp_path: Path) -> None:
    """Both round the same weights and rows in the same blocks: what is left is a last bit at the border between two codes, now and then."""
    config = str(write_run(tmp_path))
    vocabulary = json.loads((tmp_path / "model/config.json").read_text())["vocab_size"]
    write_model(tmp_path / "model", "qwen2", vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_key_value_heads=4, initializer_range=0.05)
    gaps = {}
    for name, options in (("plain", []), ("fp8", ["actor.fp8=blockwise"])):
        rows, _ = run_ranks(world, run_training, config, ["rollout.fp8=true", "run.steps=2", f"run.dir={tmp_path}/{name}", *layout, *options])[0]
        gaps[name] = max(row["actor/log_prob_gap_mean"] for row in rows)
        assert all(row["actor/grad_norm"] > 0 and row["weights/version"] == row["step"] for row in rows)
    assert gaps["fp8"] < gaps["plain"] / 5 and gaps["plain"] > 0.01, gaps
