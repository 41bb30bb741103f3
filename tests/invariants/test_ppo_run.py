"""Whole PPO runs: roles with layouts of their own in one world train as one rank does, warm up, and go on from checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parallel.errors import UserError
from tests.checkpoint.conversion import to_hf
from tests.runs import read_metrics, run_training, values, write_run
from tests.worker_pool import run_ranks

PPO: dict[str, Any] = dict(
    algorithm={"name": "ppo", "kl_coefficient": 0.05, "kl_in": "reward", "gamma": 0.99, "lam": 0.9},
    critic={"optimizer": {"lr": 1e-3, "eps": 1e-4}, "head_std": 0.3, "micro_batch_size": 4, "value_clip": 0.05, "updates_per_step": 2})
# world and roles: actor, critic and reference each in a layout of its own
ROLES = [
    (2, ["actor.parallel.tp=2", "critic.parallel.pp=2", "critic.micro_batch_size=3", "reference.parallel.tp=1"]),
    (2, ["actor.parallel.pp=2", "critic.parallel.tp=2", "critic.parallel.sequence_parallel=true", "reference.parallel.tp=2",
         "critic.packing=shared_prompt"]),
    (4, ["critic.parallel.pp=2", "critic.parallel.vpp=2", "reference.parallel.pp=4", "actor.parallel.tp=2", "critic.optimizer.distributed=false"]),
    (1, ["critic.packing=padded", "actor.packing=padded", "critic.micro_batch_size=16"]),
]
SAME = ("actor/loss", "actor/kl_to_reference", "critic/loss", "critic/explained_variance", "critic/value_mean", "critic/clip_fraction", "reward/mean")


def critic_of(checkpoint: Path, out: Path) -> dict[str, torch.Tensor]:
    """The critic of a run's checkpoint, exported as a Hugging Face directory."""
    to_hf(checkpoint / "critic", out)
    return load_file(out / "model.safetensors")


def test_roles_in_layouts_of_their_own_train_as_on_one_rank(tmp_path: Path) -> None:
    config = str(write_run(tmp_path, **PPO, checkpoint={"every": 3}))
    run_ranks(1, run_training, config, ["run.only=rollout"])
    replay = [f"rollout.replay={tmp_path}/run/rollouts"]
    want, weights = run_ranks(1, run_training, config, [f"run.dir={tmp_path}/one", *replay], with_weights=True)[0]
    assert all(row["critic/loss"] > 1e-3 and row["actor/kl_to_reference"] != 0 for row in want[1:])
    assert any(row["critic/clip_fraction"] > 0 for row in want), "the value clip must be at work"
    critic = critic_of(tmp_path / "one/checkpoints/step_000003", tmp_path / "hf-one")
    assert "score.weight" in critic and "lm_head.weight" not in critic
    for i, (world, overrides) in enumerate(ROLES):
        got, other = run_ranks(world, run_training, config, [f"run.dir={tmp_path}/{i}", *replay, *overrides], with_weights=True)[0]
        for a, b in zip(got, want, strict=True):
            for key in SAME:  # the explained variance is a ratio far from 0 here: it is as near as the weights are
                rel = 1e-4 if key == "critic/explained_variance" else 0
                assert a[key] == pytest.approx(b[key], rel=rel, abs=1e-5), (overrides, a["step"], key)
            for role in ("actor", "critic"):
                assert a[f"{role}/grad_norm"] == pytest.approx(b[f"{role}/grad_norm"], rel=2e-4), (overrides, a["step"], role)
        for name, value in weights.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=2e-6, msg=lambda m: f"{overrides} actor {name}: {m}")
        found = critic_of(tmp_path / f"{i}/checkpoints/step_000003", tmp_path / f"hf-{i}")
        for name, value in critic.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6, msg=lambda m: f"{overrides} critic {name}: {m}")


def test_a_critics_warm_up_leaves_the_actor_and_the_order_of_the_data_alone(tmp_path: Path) -> None:
    config = str(write_run(tmp_path, **PPO))
    start = load_file(tmp_path / "model" / "model.safetensors")
    _, warm = run_ranks(1, run_training, config, [f"run.dir={tmp_path}/warm", "critic.warmup_steps=2", "run.steps=2"], with_weights=True)[0]
    assert all(torch.equal(warm[name], start[name]) for name in warm)
    rows, after = run_ranks(1, run_training, config, [f"run.dir={tmp_path}/more", "critic.warmup_steps=2"], with_weights=True)[0]
    assert ["actor/loss" in row for row in rows] == [False, False, True] and [row["weights/version"] for row in rows] == [1, 2, 3]
    assert not all(torch.equal(after[name], start[name]) for name in after)
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    run_ranks(1, run_training, config, [f"run.dir={tmp_path}/cold"])

    def prompts(run: str) -> list[str]:
        files = [tmp_path / run / f"samples/step_{step:06d}.jsonl" for step in (1, 2, 3)]
        return [json.loads(line)["prompt"] for file in files for line in file.read_text().splitlines()]

    assert prompts("more") == prompts("cold")


def test_a_resumed_run_is_the_uninterrupted_one_and_may_change_the_critics_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = str(write_run(tmp_path, **PPO, run={"steps": 4}, checkpoint={"every": 2, "keep": None}))
    roles = ROLES[0][1]
    whole = run_ranks(2, run_training, config, [f"run.dir={tmp_path}/whole", *roles])[0][0]
    run_ranks(2, run_training, config, [f"run.dir={tmp_path}/parts", "run.steps=2", *roles])
    again = run_ranks(2, run_training, config, [f"run.dir={tmp_path}/parts", *roles])[0][0]
    assert [values(row) for row in again] == [values(row) for row in whole]
    a, b = (critic_of(tmp_path / name / "checkpoints/step_000004", tmp_path / f"hf-{name}") for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    run_ranks(2, run_training, config, [f"run.dir={tmp_path}/other", "run.steps=2", *roles])
    other = run_ranks(2, run_training, config, [f"run.dir={tmp_path}/other", "actor.parallel.pp=2", "critic.parallel.tp=2"])[0][0]
    for x, y in zip(other[2:], whole[2:], strict=True):
        for key in ("critic/loss", "critic/grad_norm"):
            assert x[key] == pytest.approx(y[key], rel=1e-3)


def test_a_checkpoint_without_a_critic_is_refused_by_name(tmp_path: Path) -> None:
    config = str(write_run(tmp_path, checkpoint={"every": 1}))
    run_ranks(1, run_training, config, ["run.steps=1"])
    with pytest.raises(Exception, match="step_000001 holds no critic, and algorithm.name is ppo"):
        run_ranks(1, run_training, config, ["algorithm.name=ppo"])


def test_a_run_starts_from_the_critic_of_another(tmp_path: Path) -> None:
    config = str(write_run(tmp_path, **PPO, checkpoint={"every": 1}))
    run_ranks(1, run_training, config, ["run.steps=1"])
    critic = critic_of(tmp_path / "run/checkpoints/step_000001", tmp_path / "critic")
    start = [f"run.dir={tmp_path}/next", f"critic.path={tmp_path}/critic", "critic.optimizer.lr=1e-12", "run.steps=1"]
    for overrides, words in ((start, "holds a value head, which is used"), ([f"model.path={tmp_path}/critic"], "is a value model")):
        with pytest.raises(Exception, match=words):
            run_ranks(1, run_training, config, overrides)
    run_ranks(1, run_training, config, [*start, "critic.head_std=0"])
    again = critic_of(tmp_path / "next/checkpoints/step_000001", tmp_path / "again")
    for name, value in critic.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-9)
    assert read_metrics(tmp_path / "next")[0]["critic/value_mean"] != 0
    common = tmp_path / "next/checkpoints/step_000001/critic/common.pt"
    common.write_bytes(common.read_bytes()[:-1])
    with pytest.raises(UserError, match="critic' is not complete: common.pt has"):  # by the part of the checkpoint's manifest
        critic_of(tmp_path / "next/checkpoints/step_000001", tmp_path / "damaged")
