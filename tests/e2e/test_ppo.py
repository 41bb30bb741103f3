"""PPO under torchrun: actor, critic and reference in three layouts on two ranks, killed and resumed; and the demo, which learns."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT, Launched, wait_for
from tests.runs import read_metrics, values, write_run


@pytest.mark.slow
def test_a_killed_run_with_a_critic_is_the_uninterrupted_one(tmp_path: Path) -> None:
    config = str(write_run(
        tmp_path, run={"steps": 4}, actor={"parallel": {"tp": 2}}, rollout={"tp": 2}, checkpoint={"every": 1},
        algorithm={"name": "ppo", "kl_coefficient": 0.05, "kl_in": "reward"}, reference={"parallel": {"tp": 1}},
        critic={"parallel": {"pp": 2}, "warmup_steps": 1, "optimizer": {"lr": 1e-3}}))
    whole = Launched(tmp_path / "whole.log", "train", config, f"run.dir={tmp_path}/whole")
    assert whole.finish() == 0, (tmp_path / "whole.log").read_text()[-3000:]
    want = read_metrics(tmp_path / "whole")
    assert [row["step"] for row in want] == [1, 2, 3, 4] and all(row["critic/grad_norm"] > 0 for row in want)
    assert all(row["actor/log_prob_gap_max"] < 1e-3 for row in want)

    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run.log"
    run = Launched(log, "train", config, f"run.dir={tmp_path}/run")
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "two steps")
        os.kill(run.ranks()[0], signal.SIGKILL)
        wait_for(lambda: not run.pids(), "all processes gone", 60)
    finally:
        run.end()
    again = Launched(log, "train", config, f"run.dir={tmp_path}/run")
    try:
        assert again.finish() == 0, log.read_text()[-3000:]
    finally:
        again.end()
    assert "resumed from" in log.read_text()
    got = read_metrics(tmp_path / "run")
    assert [values(row) for row in got] == [values(row) for row in want]


@pytest.mark.slow
def test_the_demo_with_a_critic_learns(tmp_path: Path) -> None:
    """The documented command with its documented bounds; the model that it starts from is made first."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mcore_rl", "train", "configs/demo_ppo_cpu.yaml"],
        cwd=tmp_path, env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(tmp_path / "runs" / "demo-ppo")
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-10:]) / 10 >= sum(rewards[:5]) / 5 + 0.3
    evaluated = [row for row in rows if "eval/greedy" in row]
    assert evaluated[0]["eval/greedy"] <= 0.5 and evaluated[-1]["eval/greedy"] >= 0.8
    assert sum(row["critic/explained_variance"] for row in rows[6:16]) / 10 > 0.25, "the critic knows more than the mean"
    for row in rows:
        assert row.get("actor/ratio_max_deviation", 0.0) < 1e-4 and row["actor/log_prob_gap_max"] < 1e-3, row["step"]
