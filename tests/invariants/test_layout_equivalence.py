"""Replayed rollouts with mixed rewards from the same weights: training does not depend on the parallel layout (invariant 4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runs import run_training, write_run
from tests.worker_pool import run_ranks

CASES = [
    (2, ["actor.parallel.tp=2", "actor.micro_batch_size=3"]),
    (2, ["actor.parallel.pp=2", "actor.micro_batch_size=2"]),
    (2, ["actor.micro_batch_size=5"]),
    (2, ["actor.optimizer.distributed=false", "actor.micro_batch_size=16"]),
    (4, ["actor.parallel.tp=2", "actor.parallel.pp=2", "actor.micro_batch_size=1"]),
]


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_replayed_rollouts_train_the_same_under_every_layout(tmp_path: Any, aggregation: str) -> None:
    config = str(write_run(tmp_path, algorithm={"loss_aggregation": aggregation, "kl_coefficient": 0.05, "entropy_coefficient": 0.01}))
    # a run that only stores rollouts takes no optimizer step, so a warm-up longer than it does no harm
    run_ranks(1, run_training, config, ["run.only=rollout", "actor.optimizer.schedule=cosine", "actor.optimizer.warmup_steps=9"])
    replay = [f"rollout.replay={tmp_path}/run/rollouts"]
    want, weights = run_ranks(1, run_training, config, [f"run.dir={tmp_path}/one", *replay], with_weights=True)[0]
    assert all(0 < row["reward/mean"] < 1 and abs(row["actor/loss"]) > 1e-4 for row in want), "the rewards must be mixed"
    for i, (world, overrides) in enumerate(CASES):
        got, other = run_ranks(world, run_training, config, [f"run.dir={tmp_path}/{i}", *replay, *overrides], with_weights=True)[0]
        assert len(got) == len(want) == 3
        for a, b in zip(got, want, strict=True):
            assert abs(a["actor/loss"] - b["actor/loss"]) < 1e-6, (overrides, a["step"])
            assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4), (overrides, a["step"])
        for name, value in weights.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6, msg=lambda m: f"{overrides} {name}: {m}")
