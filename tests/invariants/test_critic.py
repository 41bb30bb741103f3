"""A critic learns the same under every parallel layout, packing and micro-batch (invariant 4), and what transformers learns.

Values, loss, every gradient at a large initial std and the trajectory of three steps, against one rank with padded rows, which is held
against transformers' layers under a linear head. The samples are those of `test_packing`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invariants.test_packing import PACKED, SEQUENCE, SHARED, samples
from tests.models import write_model
from tests.parallel.test_models import gathered
from tests.worker_pool import run_ranks

HEAD_STD, SEED, CLIP = 0.1, 11, 0.2


def targets() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Values at the start of the step and returns, by sample; made up."""
    ids, _ = samples()
    old = [torch.sin(torch.arange(len(s)) * 0.7 + i) for i, s in enumerate(ids)]
    return old, [torch.cos(torch.arange(len(s)) * 0.9 + 2 * i) for i, s in enumerate(ids)]


def open_critic(directory: str, parallel: dict[str, Any], seed: int = SEED, head_std: float = HEAD_STD, **optimizer: Any) -> Any:
    """A value model from a HF directory, in its own layout, on this rank of the pool's world."""
    import torch.distributed as dist

    from checkpoint.value_head import read_value_model, value_model
    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy
    from parallel.config import ParallelConfig
    from parallel.device import Device, prepare_megatron
    from parallel.packing import Batching
    from parallel.training import OptimizerConfig, build

    batching = Batching(**optimizer.pop("batching", {}))
    device = Device("cpu", "gloo")
    prepare_megatron(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    model, holds = value_model(directory, make_vocab_size_divisible_by=8)
    layout = ParallelConfig(**parallel)
    layout.validate(world, model, "critic")
    training = build(model, layout, "float32", device, rank, world, 7, OptimizerConfig(**optimizer))
    read_value_model(directory, training, rank, world, holds, seed, head_std)
    return Policy(training, Exchange(), world, batching)


def train(directory: str, parallel: dict[str, Any], batching: dict[str, Any], size: int, distributed: bool = False, steps: int = 3,
          only_chunk: int | None = None) -> Any:
    """On a rank: (losses, gradient norms, first step's canonical gradients, weights, values of the start), on rank 0.

    With `only_chunk` the gradients of that chunk alone are finalised (planted: verl#5702; -1: of none).
    """
    import torch.distributed as dist

    from mcore_rl.ppo import value_loss

    critic = open_critic(directory, parallel, batching=batching, lr=1e-3, eps=1e-2, clip_grad=0.0, distributed=distributed)
    training = critic.training
    if only_chunk is not None:
        whole = training.config.finalize_model_grads_func
        training.config.finalize_model_grads_func = lambda chunks, *a, **k: (
            whole(chunks[only_chunk:only_chunk + 1], *a, **k) if only_chunk >= 0 else None)
    ids, masks = samples()
    old, returns = targets()
    count = sum(map(sum, masks))
    start = critic.values(ids, size + 1, masks)

    def loss(i: int, values: torch.Tensor) -> Any:
        value = (torch.tensor(masks[i]) * value_loss(values, old[i], returns[i], CLIP)[0]).sum() / count
        return value, value.detach()

    losses, norms, grads = [], [], None
    for _ in range(steps):
        reports, norm, _ = critic.update(ids, range(len(ids)), size, 1.0, loss, masks)
        losses.append(float(torch.stack(reports).double().sum()))
        norms.append(norm)
        if grads is None and not distributed:  # the distributed optimizer reduces only each rank's part
            several = len(training.modules) > 1
            grads = gathered(training, {**training.tensors, **{(f"chunk{i}." if several else "") + n: p.main_grad
                                        for i, m in enumerate(training.modules) for n, p in m.named_parameters()}})
    weights = gathered(training, training.tensors)
    return (losses, norms, grads or {}, weights, torch.cat(start)) if dist.get_rank() == 0 else None


def reference(directory: str) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """transformers' layers under a linear head: loss, gradients and values, one sample after the other."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    head = (torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(SEED)) * HEAD_STD).requires_grad_()
    ids, masks = samples()
    old, returns = targets()
    total, found = torch.zeros(()), []
    for tokens, mask, before, aim in zip(ids, masks, old, returns, strict=True):
        states = model(torch.tensor([tokens])).last_hidden_state[0]
        values = (states @ head.T)[:-1, 0]  # the state before token t is that at position t - 1
        found.append(torch.cat([torch.zeros(1), values.detach() * torch.tensor(mask[1:])]))
        for v, b, r, m in zip(values, before[1:], aim[1:], mask[1:], strict=True):
            if m:
                total = total + 0.5 * torch.maximum((v - r) ** 2, (b + (v - b).clamp(-CLIP, CLIP) - r) ** 2) / sum(map(sum, masks))
    total.backward()
    gradients = {f"model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert head.grad is not None
    return total.item(), {**gradients, "score.weight": head.grad}, torch.cat(found)


def difference(got: Any, want: Any) -> str | None:
    """What differs first: loss, norm, gradient, weight or value; None where all agree in fp32."""
    for k, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
        if abs(a - b) > 1e-6:
            return f"loss of step {k}: {a} against {b}"
    for k, (a, b) in enumerate(zip(got[1], want[1], strict=True)):
        if abs(a - b) > 1e-4 * b:
            return f"gradient norm of step {k}: {a} against {b}"
    for name in got[2]:
        off = ((got[2][name] - want[2][name]).abs().max() / want[2][name].abs().max().clamp_min(1e-12)).item()
        if off > 2e-5:
            return f"gradient of {name}: off by {off:.1e} of its largest"
    for name in want[3]:
        if not torch.allclose(got[3][name], want[3][name], atol=2e-6, rtol=1e-4):
            return f"weight {name}: off by {(got[3][name] - want[3][name]).abs().max():.1e}"
    return None if torch.allclose(got[4], want[4], atol=5e-5) else f"values: off by {(got[4] - want[4]).abs().max():.1e}"


# world, parallel sizes, batching, sequences per micro-batch, distributed optimizer
CASES: dict[str, list[tuple[int, dict[str, Any], dict[str, Any], int, bool]]] = {
    "qwen2": [
        (1, {}, SHARED, 4, True), (1, {}, dict(PACKED, max_tokens=30), 1, False), (2, dict(tp=2), PACKED, 5, False), (2, SEQUENCE, SHARED, 6, False),
        (2, SEQUENCE, dict(packing="padded"), 3, True), (2, dict(pp=2), PACKED, 3, False), (2, {}, PACKED, 2, False),
        (2, {}, dict(SHARED, max_tokens=40), 1, True), (2, dict(pp=2, vpp=2), PACKED, 3, False),
        (4, dict(tp=2, sequence_parallel=True, pp=2), PACKED, 4, False),
    ],
    "qwen3_moe": [(2, dict(SEQUENCE, ep=2, etp=1), PACKED, 5, False), (2, dict(ep=2), SHARED, 4, True)],
    "deepseek_v3": [(2, SEQUENCE, SHARED, 5, False), (2, dict(pp=2), PACKED, 4, False)],
}


@pytest.mark.parametrize("family", CASES)
def test_a_critic_learns_the_same_under_every_layout_and_what_transformers_learns(family: str, tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", family, initializer_range=0.3, num_hidden_layers=4 if family == "qwen2" else 2))
    want = run_ranks(1, train, directory, {}, dict(packing="padded"), 3)[0]
    loss, gradients, values = reference(directory)
    assert want[0][0] == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(want[4], values, atol=5e-5, rtol=0)
    assert gradients.keys() >= {"score.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"}
    assert "lm_head.weight" not in want[2]
    for key in want[2].keys() & gradients.keys():
        off = (want[2][key] - gradients[key]).abs().max() / gradients[key].abs().max()
        assert off < 1e-4, f"transformers' gradient of {key}: off by {off:.1e} of its largest"
    for world, parallel, batching, size, distributed in CASES[family]:
        got = run_ranks(world, train, directory, parallel, batching, size, distributed)[0]
        assert (found := difference(got, want)) is None, f"{family} {parallel} {batching} {size}: {found}"


def test_gradients_that_are_not_finalised_on_every_chunk_are_seen(tmp_path: Path) -> None:
    """The fault of verl#5702, planted: the comparison above finds it over data-parallel ranks, and on the second of two virtual chunks."""
    directory = str(write_model(tmp_path / "m", "qwen2", initializer_range=0.3))
    want = run_ranks(1, train, directory, {}, PACKED, 3, steps=1)[0]
    assert difference(run_ranks(2, train, directory, {}, PACKED, 3, steps=1)[0], want) is None
    assert difference(run_ranks(4, train, directory, dict(pp=2, vpp=2), PACKED, 3, steps=1)[0], want) is None
    assert "gradient" in (difference(run_ranks(2, train, directory, {}, PACKED, 3, steps=1, only_chunk=-1)[0], want) or "")
    for chunk in (0, 1):
        assert "gradient" in (difference(run_ranks(4, train, directory, dict(pp=2, vpp=2), PACKED, 3, steps=1, only_chunk=chunk)[0], want) or "")
