"""Replayed rollouts with mixed rewards from the same weights: training does not depend on the parallel layout (invariant 4)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.models import write_model
from tests.runs import run_training, write_run
from tests.worker_pool import run_ranks

CASES = [
    (2, ["actor.parallel.tp=2", "actor.micro_batch_size=3"]),
    (2, ["actor.parallel.pp=2", "actor.micro_batch_size=2"]),
    (2, ["actor.micro_batch_size=5"]),
    (2, ["actor.optimizer.distributed=false", "actor.micro_batch_size=16"]),
    (4, ["actor.parallel.tp=2", "actor.parallel.pp=2", "actor.micro_batch_size=1"]),
    (1, ["actor.packing=padded"]),
    (2, ["actor.packing=shared_prompt", "actor.parallel.pp=2"]),
    (2, ["actor.parallel.cp=2", "actor.micro_batch_size=3"]),
]


@pytest.mark.parametrize("aggregation", ["token-mean", pytest.param("sequence-mean", marks=pytest.mark.slow)])
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


def test_b03_tied_copies_train_as_one_under_every_pipeline(tmp_path: Any) -> None:
    """First and last stage hold the embedding each. Every sync refuses copies that differ (the checksums of replicas), and weights are
    gathered after each run; the update is that of one stage, which sums both uses (../shared/cases: B03)."""
    config = write_run(tmp_path)
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    same = {key: settings[key] for key in ("vocab_size", "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id")}
    write_model(tmp_path / "model", "qwen2", num_hidden_layers=4, tie_word_embeddings=True, **same)
    run_ranks(1, run_training, str(config), ["run.only=rollout", "run.steps=1"])
    options = ["run.steps=1", f"rollout.replay={tmp_path}/run/rollouts", "actor.micro_batch_size=2"]
    _, want = run_ranks(1, run_training, str(config), [f"run.dir={tmp_path}/one", *options], with_weights=True)[0]
    assert "lm_head.weight" not in want
    for world, *split in ((2, "pp=2"), (4, "pp=4"), (2, "pp=2", "vpp=2"), (4, "tp=2", "pp=2")):
        overrides = [f"run.dir={tmp_path}/{'-'.join(split)}", *options, *(f"actor.parallel.{size}" for size in split)]
        rows, got = run_ranks(world, run_training, str(config), overrides, with_weights=True)[0]
        assert rows[-1]["weights/version"] == 1, "the copies were equal after the step"
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6, msg=lambda m: f"{split} {name}: {m}")
