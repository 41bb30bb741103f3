"""The load of experts: losses and counts do not depend on the split, and are those that transformers' routers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig, MoE
from parallel.options import MoEOptions, TrainingOptions
from parallel.routing import choose_experts
from tests.models import write_model
from tests.parallel.test_models import SEQUENCES, gathered, open_model
from tests.worker_pool import run_ranks

COEFFICIENT, RATE = 0.3, 0.25


def update(directory: str, parallel: dict[str, Any], size: int, options: TrainingOptions) -> Any:
    """On a rank: (canonical gradients, canonical weights on rank 0, load metrics, counts by layer of this stage) of one update."""
    import torch.distributed as dist

    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy

    training = open_model(directory, parallel, True, options=options, lr=1e-12, clip_grad=0.0, distributed=False)
    policy, total = Policy(training, Exchange(), dist.get_world_size()), sum(len(s) - 1 for s in SEQUENCES)
    policy.update(SEQUENCES, range(8), size, 1.0, lambda i, lp, h: (-lp[1:].sum() / total, lp.sum().detach()))
    several = len(training.modules) > 1
    grads = {**training.tensors, **{(f"chunk{i}." if several else "") + n: p.main_grad for i, m in enumerate(training.modules) for n, p in m.named_parameters()}}
    return gathered(training, grads), gathered(training, training.tensors), policy.load(), {k: v.counts for k, v in training.load.items()}


def reference(directory: str) -> tuple[dict[str, torch.Tensor], float, list[torch.Tensor]]:
    """transformers: (gradients with the sequence-wise loss of every layer, that loss's mean over layers, counts by layer)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    total, loss, auxiliary, counts = sum(len(s) - 1 for s in SEQUENCES), torch.zeros(()), torch.zeros(()), []
    for s in SEQUENCES:
        out = model(torch.tensor([s[:-1]]), output_router_logits=True)
        loss = loss - out.logits[0].log_softmax(-1).gather(1, torch.tensor(s[1:])[:, None]).sum() / total
        layers = [logits.view(-1, 8).softmax(-1) for logits in out.router_logits]
        chosen = [torch.nn.functional.one_hot(p.topk(3, -1).indices, 8).sum(1) for p in layers]
        for p, c in zip(layers, chosen, strict=True):
            auxiliary = auxiliary + 8 * (c.float().mean(0) / 3 * p.mean(0)).sum() / len(SEQUENCES)
        counts.append(torch.stack([c.sum(0) for c in chosen]))
    (loss + COEFFICIENT * auxiliary).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(auxiliary) / len(layers), list(sum(counts))


SEQUENCE = dict(tp=2, sequence_parallel=True)
CUTS: list[tuple[int, dict[str, Any], int, dict[str, Any]]] = [
    (1, {}, 8, {}), (1, {}, 3, dict(recompute="full")), (2, dict(ep=2), 2, dict(recompute="selective", recompute_modules=("core_attn", "moe"))),
    (2, dict(SEQUENCE, ep=2, etp=1), 5, {}), (2, dict(pp=2), 2, dict(recompute="full")), (2, dict(pp=2, vpp=2), 2, {}),
    (2, dict(cp=2), 3, dict(recompute="full")), (2, dict(cp=2, ep=2), 5, {})]


def test_the_loss_of_sequences_is_transformers_and_does_not_depend_on_the_split(tmp_path: Path) -> None:
    """Every gradient, also where layers are computed again while other micro-batches are under way; the reported loss; the counts."""
    directory = str(write_model(tmp_path / "m", "qwen3_moe", initializer_range=0.3))
    want, auxiliary, counts = reference(directory)
    for world, parallel, size, options in CUTS:
        results = run_ranks(world, update, directory, parallel, size, TrainingOptions(moe=MoEOptions("seq_aux_loss", COEFFICIENT), **options))
        grads, _, metrics, _ = results[0]
        for name, value in want.items():
            if name in grads:
                off = ((grads[name] - value).abs().max() / value.abs().max()).item()
                assert off < 1e-4, f"gradient of {name}, {parallel} {options}: off by {off:.1e} of its largest"
        assert metrics["moe/aux_loss"] == pytest.approx(auxiliary, rel=1e-5)
        found = {layer: c for r in results for layer, c in r[3].items()}
        assert all(torch.equal(found[layer].long(), counts[layer]) for layer in range(4)), (parallel, options)
        shares = [c.double() / c.sum() for c in counts]
        assert metrics["moe/max_load_share"] == pytest.approx(max(float(s.max()) * 8 for s in shares))
        assert 0 < metrics["moe/load_entropy"] < 1


def test_the_loss_of_micro_batches_depends_on_the_split_as_said(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", "qwen3_moe", initializer_range=0.3, num_hidden_layers=2))
    options = TrainingOptions(moe=MoEOptions("aux_loss", COEFFICIENT))
    whole, halves, single = (run_ranks(1, update, directory, {}, size, options)[0] for size in (8, 4, 1))
    sequences = run_ranks(1, update, directory, {}, 8, TrainingOptions(moe=MoEOptions("seq_aux_loss", COEFFICIENT)))[0]
    name = "model.layers.0.mlp.gate.weight"
    assert (whole[0][name] - halves[0][name]).abs().max() > 1e-4
    torch.testing.assert_close(single[0][name], sequences[0][name], atol=1e-6, rtol=1e-4)  # of single sequences the two are one


def test_biases_move_towards_an_even_load_however_work_is_split(tmp_path: Path) -> None:
    """By the rate, up below the mean and down above it, in fp32; the same on every layout; nothing else has moved."""
    from safetensors.torch import load_file

    directory = write_model(tmp_path / "m", "deepseek_v3", initializer_range=0.3)
    before = load_file(directory / "model.safetensors")
    options, seen = TrainingOptions(moe=MoEOptions("bias", bias_update_rate=RATE)), None
    tokens = sum(len(s) - 1 for s in SEQUENCES)
    for world, parallel, size in ((1, {}, 8), (2, dict(ep=2), 3), (2, dict(SEQUENCE, ep=2, etp=1), 4), (2, dict(pp=2), 2), (2, dict(cp=2), 3)):
        results = run_ranks(world, update, str(directory), parallel, size, options)
        counts = {layer: c for r in results for layer, c in r[3].items()}
        assert sorted(counts) == [1, 2, 3] and all(c.sum() == 3 * tokens for c in counts.values())  # no padding, and each token once
        for layer, c in counts.items():
            name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            moved = results[0][1][name] - before[name]
            torch.testing.assert_close(moved, RATE * torch.sign(c.mean() - c).float(), atol=1e-6, rtol=0)
        seen = seen or counts
        assert all(torch.equal(seen[k], counts[k]) for k in counts), parallel


def test_balancing_that_cannot_work_is_refused(tmp_path: Path) -> None:
    dense = ModelConfig.from_directory(write_model(tmp_path / "d", "qwen2"))
    experts = ModelConfig.from_directory(write_model(tmp_path / "e", "qwen3_moe"))
    for model, moe, packing, message in (
            (dense, MoEOptions("seq_aux_loss"), "packed", "qwen2 has no experts"), (experts, MoEOptions("bias"), "packed", "have no correction bias"),
            (experts, MoEOptions("seq_aux_loss"), "padded", "padding would count"), (experts, MoEOptions("seq_aux_loss"), "shared_prompt", "no one sequence")):
        with pytest.raises(UserError, match=message):
            TrainingOptions(moe=moe).validate(model, packing)
    for modules, message in ((("moe",), "has no experts"),):
        with pytest.raises(UserError, match=message):
            TrainingOptions("selective", modules).validate(dense)
    with pytest.raises(UserError, match="every layer of the model has experts"):
        TrainingOptions("selective", ("mlp",)).validate(experts)
    with pytest.raises(UserError, match="recompute_modules"):
        TrainingOptions("selective", ("layernorm",))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="aux_loss_coefficient is 0"):
        MoEOptions("seq_aux_loss", 0.0)


def test_a_choice_that_was_made_before_is_kept_and_weighed_anew() -> None:
    moe = MoE(4, 2, 8, (0,))
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]], requires_grad=True)
    weights, indices = choose_experts(logits, moe, None, torch.tensor([[3, 0]]))
    assert indices.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, logits[:, [3, 0]].softmax(-1))
    weights[0, 0].backward()
    assert logits.grad is not None and logits.grad[0, 3] > 0
