"""A sample of two turns, made by hand: only the policy's tokens train, and the gradient is that of the written-out loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.sample import Sample
from mcore_rl.stored_samples import store_samples
from tests.runs import write_run
from tests.worker_pool import run_ranks

LOW, HIGH = 0.2, 0.28


def two_turn(group: int, index: int, reward: float) -> Sample:
    """prompt | policy | tool output | policy, with token ids that differ between samples."""
    parts = [(False, 4), (True, 3), (False, 2), (True, 2 + index)]
    mask = tuple(m for m, n in parts for _ in range(n))
    ids = tuple(4 + (3 * i + 5 * group + 7 * index) % 12 for i in range(len(mask)))
    return Sample(group=group, index=index, row=group, token_ids=ids, mask=mask, rollout_log_probs=tuple(-0.5 * m for m in mask),
                  versions=tuple(0 if m else -1 for m in mask), finish_reason="stop", reward=reward)


def samples() -> list[Sample]:
    return [two_turn(g, k, float((g + k) % 2)) for g in range(2) for k in range(3)]


def gradients(config: str, directory: str, parallel: list[str]) -> Any:
    """On a rank: one update from the stored samples with old log-probs moved off the policy; (loss, canonical gradients) on rank 0."""
    import torch.distributed as dist

    from mcore_rl import steps
    from mcore_rl.commands.train import open_run
    from mcore_rl.config import load_config
    from mcore_rl.run import joined
    from mcore_rl.sample import Batch
    from tests.parallel.test_models import gathered

    loaded = load_config(config, [f"rollout.replay={directory}", "actor.optimizer.distributed=false", "actor.optimizer.clip_grad=0", "run.strict=false", *parallel], "train")
    with joined("cpu", 1) as world:
        run = open_run(loaded, world, Path(loaded.run.dir))
        batch = Batch(1, rows=[0])
        for phase in (steps.generate, steps.reward, steps.old_log_probs, steps.advantages):
            phase(run, batch)
        batch.columns["old_log_probs"] = [x + 0.3 * torch.sin(torch.arange(len(x)) + i) for i, x in enumerate(batch["old_log_probs"])]
        steps.update(run, batch)
        training = run.actor.training
        grads = gathered(training, {n: p.main_grad for n, p in training.modules[0].named_parameters()})
    return (batch.metrics["actor/loss"], grads) if dist.get_rank() == 0 else None


def reference(model_directory: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The same loss written out with transformers and autograd, one sample after the other."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="eager")
    batch = samples()
    tokens = sum(s.response_length for s in batch)
    total = torch.zeros(())
    for i, s in enumerate(batch):
        rewards = torch.tensor([o.reward for o in batch if o.group == s.group])
        advantage = (s.reward - rewards.mean()) / (rewards.std() + 1e-6)
        logits = model(torch.tensor([s.token_ids])).logits[0, :-1]
        log_probs = torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(-1, torch.tensor(s.token_ids[1:]).unsqueeze(-1)).squeeze(-1)])
        old = log_probs.detach() + 0.3 * torch.sin(torch.arange(len(s.token_ids)) + i)
        for t, mine in enumerate(s.mask):
            if mine:
                ratio = (log_probs[t] - old[t]).exp()
                total = total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH)) / tokens
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_gradient_of_two_turn_samples_is_that_of_the_written_out_loss(tmp_path: Any, family: str) -> None:
    config = str(write_run(tmp_path, family, algorithm={"clip_ratio_low": LOW, "clip_ratio_high": HIGH}))
    store_samples(tmp_path / "stored", 1, samples())
    loss, want = reference(str(tmp_path / "model"))
    for world, parallel in [(1, ["actor.micro_batch_size=2"]), (2, ["actor.parallel.tp=2", "actor.micro_batch_size=4"])]:
        got, grads = run_ranks(world, gradients, config, str(tmp_path / "stored"), parallel)[0]
        assert got == pytest.approx(loss, abs=1e-6)
        for name, value in want.items():
            off = (grads[name] - value).abs().max() / value.abs().max()
            assert off < 1e-4, f"{family} {parallel} {name}: off by {off:.1e} of its largest"


def test_a_sample_whose_columns_differ_in_length_is_refused() -> None:
    sample = two_turn(0, 0, 1.0)
    with pytest.raises(ValueError, match="differ in length"):
        replace(sample, mask=sample.mask[:-1])
