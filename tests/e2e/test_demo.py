"""The demo keeps its promises: what `make demo` runs, from nothing, in a directory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT
from tests.runs import read_metrics


@pytest.mark.slow
def test_the_demo_learns_to_carry_and_stays_on_policy(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mcore_rl", "train", "configs/demo_cpu.yaml"],
        cwd=tmp_path, env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(tmp_path / "runs" / "demo")
    rewards = [r["reward/mean"] for r in rows]
    assert sum(rewards[-10:]) / 10 >= sum(rewards[:5]) / 5 + 0.3
    evaluated = [r for r in rows if "eval/greedy" in r]
    for key in ("eval/greedy", "eval/avg@2", "eval/pass@2"):
        assert evaluated[0][key] <= 0.5 and evaluated[0]["eval/weights_version"] == 0, key
        assert evaluated[-1][key] >= 0.8 and evaluated[-1]["eval/weights_version"] == rows[-1]["step"], key
    for row in rows:
        assert row["actor/ratio_max_deviation"] < 1e-4 and row["actor/log_prob_gap_max"] < 1e-3, row["step"]
    for word in ("is missing: making it first", "Mean reward", "before", "after", "metrics.jsonl", "To continue:"):
        assert word in done.stdout, word


@pytest.mark.slow
def test_the_demo_with_experts_learns_and_keeps_their_load_apart(tmp_path: Path) -> None:
    """EP2 in actor and engine, from nothing; the load of the experts is in every record."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mcore_rl", "train", "configs/demo_moe.yaml"],
        cwd=tmp_path, env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(tmp_path / "runs" / "demo-moe")
    rewards = [r["reward/mean"] for r in rows]
    assert sum(rewards[-10:]) / 10 >= sum(rewards[:5]) / 5 + 0.2
    for row in rows:
        assert row["actor/ratio_max_deviation"] < 1e-4 and row["actor/log_prob_gap_max"] < 1e-3, row["step"]
        assert 1.0 <= row["moe/max_load_share"] < 2.0 and 0.8 < row["moe/load_entropy"] <= 1.0, row["step"]


def test_no_held_out_prompt_is_in_a_training_set() -> None:
    from mcore_rl.synthetic import BUILTIN

    for train, held_out in [("addition-train", "addition-held-out"), ("addition-warm-up", "addition-held-out"), ("digit-sums-train", "digit-sums-held-out")]:
        seen = {str(row["prompt"]) for row in BUILTIN[train]()}
        unseen = {str(row["prompt"]) for row in BUILTIN[held_out]()}
        assert seen and unseen and not seen & unseen
