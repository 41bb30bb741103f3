"""Trainer and engine that take turns in holding memory make the run that they make side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import run_training, values, write_run
from tests.worker_pool import run_ranks

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"steps": 2}, "model": {"dtype": "bfloat16"}, "algorithm": {"kl_coefficient": 0.1}, "checkpoint": {"every": 1, "keep": 1},
    "evaluation": {"data": "builtin:addition-held-out", "every": 1, "max_prompts": 4},
}


PPO = {"algorithm": {"name": "ppo", "kl_coefficient": 0.1, "kl_in": "reward"}, "critic": {"warmup_steps": 1, "micro_batch_size": 4}}


@pytest.mark.parametrize(("family", "world", "parallel", "more"), [("qwen2", 1, {}, PPO), pytest.param("qwen3_moe", 2, dict(ep=2), {}, marks=pytest.mark.slow)])
def test_the_trajectory_does_not_depend_on_who_holds_memory(tmp_path: Path, family: str, world: int, parallel: dict[str, Any],
                                                            more: dict[str, Any]) -> None:
    """Every metric and every weight, bit by bit, with checkpoints, evaluations and a reference; and a resume from the middle."""
    path = str(write_run(tmp_path, family, **{**SECTIONS, **more}, actor={"parallel": parallel}))
    want, weights = run_ranks(world, run_training, path, [f"run.dir={tmp_path / 'none'}"], True)[0]
    for mode in ("optimizer", "all"):
        where = [f"actor.offload={mode}", f"run.dir={tmp_path / mode}"]
        if mode == "all":
            run_ranks(world, run_training, path, [*where, "run.steps=1"])
        got, moved = run_ranks(world, run_training, path, where, True)[0]
        first = int(mode == "all")  # where a run ends it evaluates once more
        assert [values(row) for row in got][first:] == [values(row) for row in want][first:], mode
        assert all((moved[name] == tensor).all() for name, tensor in weights.items()), mode
        assert all(row["time/offload_s"] > 0 for row in got)
        assert got[-1]["memory/actor_optimizer_bytes"] == want[-1]["memory/actor_optimizer_bytes"] > 0
        assert all(row[f"memory/peak_{phase}"] > 0 for row in got for phase in ("generate", "sync"))
        assert bool(more) == ("memory/critic_optimizer_bytes" in got[-1])


def test_what_is_asleep_while_the_other_works(tmp_path: Path) -> None:
    """At each phase's end, of a run with `all`: bytes of the engine's weights, and what the actor gave up."""
    path = str(write_run(tmp_path, actor={"offload": "all"}, run={"steps": 1}))
    assert run_ranks(1, phases_of, path)[0] == {
        "generate": (False, {"optimizer", "gradients"}), "old_log_probs": (False, {"optimizer", "gradients"}), "update": (False, set()),
        "sync": (True, {"optimizer", "gradients", "parameters"})}


def phases_of(path: str) -> dict[str, Any]:
    from pathlib import Path as P

    from mcore_rl import steps
    from mcore_rl.commands.train import open_run
    from mcore_rl.config import load_config
    from mcore_rl.run import joined
    from mcore_rl.sample import Batch

    config = load_config(path, [], "train")
    with joined("cpu", 1) as world:
        P(config.run.dir).mkdir(parents=True)
        run = open_run(config, world, P(config.run.dir))
        steps.sync(run, Batch(0))
        batch, seen = Batch(1, rows=run.prompts.take()), {}
        for phase in (steps.generate, steps.reward, steps.old_log_probs, steps.advantages, steps.update, steps.sync):
            phase(run, batch)
            if phase.__name__ not in ("reward", "advantages"):
                seen[phase.__name__] = (run.rollout.engine.stats()["weights_bytes"] > 0, set(run.actor.training.memory.away))
    return seen
