"""On-policy truth and committed weights, seen from the loop (invariants 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.runs import run_training, write_run
from tests.worker_pool import run_ranks


@pytest.mark.parametrize(("world", "overrides"), [
    (2, ["actor.parallel.tp=2", "rollout.tp=2"]), (2, ["actor.parallel.pp=2", "rollout.tp=1"]), (2, ["rollout.tp=2", "actor.updates_per_step=2"]),
])
def test_every_step_starts_on_policy(tmp_path: Path, world: int, overrides: list[str]) -> None:
    """Old log-probs come from a pass with another micro-batching (8) than the update's (4); the gates are strict in these runs."""
    rows, _ = run_ranks(world, run_training, str(write_run(tmp_path)), overrides)[0]
    for row in rows:
        assert row["actor/ratio_max_deviation"] < 1e-4 and row["actor/log_prob_gap_max"] < 1e-3 and abs(row["actor/kl_to_old"]) < 1e-6
        assert row["weights/version"] == row["step"] and row["sync/bytes"] > 0
        assert row["engine/prefix_hit_rate"] == 0.75, "a group of four computes its prompt once"
        assert 0 < row["engine/kv_use_max"] <= 1 <= row["engine/batch_size_mean"] <= 16 and row["engine/preemptions"] == 0
        assert 0 <= row["engine/queued_seconds"] <= row["engine/longest_sample_seconds"] <= row["time/rollout_s"]


def disturbed(config: str, overrides: list[str], what: str, rank: int) -> str:
    """On a rank: a run in which something goes wrong at the first sync (or right after it) on one rank; the text of what stopped it."""
    from mcore_rl import steps
    from mcore_rl.commands.train import open_run
    from mcore_rl.config import load_config
    from mcore_rl.run import joined
    from mcore_rl.sample import Batch

    with joined("cpu", 1) as world:
        run = open_run(load_config(config, overrides, "train"), world, Path(config).parent)
        engine = run.rollout.engine
        if what == "byte" and world.rank == rank:
            commit = engine.commit

            def corrupted(version: int, checksums: Mapping[str, int] | None = None) -> None:
                engine.weights()["model.layers.2.mlp.down_proj.weight"].view(torch.uint8)[5, 9] ^= 1
                commit(version, checksums)

            engine.commit = corrupted
        said = []
        try:
            steps.sync(run, Batch(0))
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
        if what != "byte" and world.rank == rank:  # the trainer's weights move without a sync
            run.actor.training.tensors["decoder.layers.1.mlp.linear_fc1.weight"].mul_(1.2)
        batch = Batch(1, rows=run.prompts.take())
        try:
            for phase in (steps.generate, steps.reward, steps.old_log_probs, steps.advantages, steps.update):
                phase(run, batch)
        except RuntimeError as error:
            return "\n".join([*said, f"{type(error).__name__}: {error}"])
        return "\n".join([*said, "nothing stopped it"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_corrupted_byte_in_one_engine_shard_stops_sync_and_rollout_on_every_rank(tmp_path: Path, rank: int) -> None:
    config = str(write_run(tmp_path))
    for text in run_ranks(2, disturbed, config, ["actor.parallel.tp=2", "rollout.tp=2"], "byte", rank):
        sync, rollout = text.split("\n")
        assert sync.startswith("WeightsError") and "model.layers.2.mlp.down_proj.weight" in sync, text
        assert rollout.startswith("EngineRefuses"), text


def test_a_strict_run_stops_with_an_explanation_when_trainer_and_engine_disagree(tmp_path: Path) -> None:
    config = str(write_run(tmp_path))
    for text in run_ranks(2, disturbed, config, ["actor.parallel.tp=2", "rollout.tp=2"], "drift", 1):
        assert text.startswith("OffPolicy") and "actor/log_prob_gap_max" in text and "run.strict=false" in text, text
    for text in run_ranks(2, disturbed, config, ["actor.parallel.tp=2", "rollout.tp=2", "run.strict=false"], "drift", 1):
        assert text == "nothing stopped it"


def test_without_a_log_prob_pass_the_update_is_the_same(tmp_path: Path) -> None:
    """skip_old_log_probs is allowed where old log-probs are provably the update's own forward."""
    config = str(write_run(tmp_path))
    want, weights = run_ranks(1, run_training, config, [f"run.dir={tmp_path}/a"], with_weights=True)[0]
    got, other = run_ranks(1, run_training, config, [f"run.dir={tmp_path}/b", "actor.skip_old_log_probs=true"], with_weights=True)[0]
    assert [r["reward/mean"] for r in got] == [r["reward/mean"] for r in want]
    for name, value in weights.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)
