"""Packing does not change what is learnt (invariant 4): {packed, padded, shared prompts} x layouts x micro-batches x families.

Against padded rows on one rank, which are held against transformers here too: loss, every gradient at a large initial std, and the
trajectory of three steps. The samples are groups that share a prompt, with responses of all lengths (one of them empty, one of a
single token), one of two turns, and one that trains nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import write_model
from tests.parallel.test_models import gathered, open_model
from tests.worker_pool import run_ranks

ADVANTAGES = (1.0, -0.7, 0.4)
# (prompt length, response lengths) of each group
GROUPS = ((7, (3, 6, 1)), (4, (5, 0, 9)), (9, (2, 2, 7)), (6, (4, 8, 5)))


def samples() -> tuple[list[list[int]], list[list[bool]]]:
    """Token ids and training masks, without advantages; group g is samples 3 g to 3 g + 2."""
    ids, masks = [], []
    for g, (prompt, responses) in enumerate(GROUPS):
        for k, n in enumerate(responses):
            head = [(11 * i + 7 * g) % 200 + 1 for i in range(prompt)]
            ids.append(head + [(13 * i + 5 * k + 3 * g) % 200 + 1 for i in range(n)])
            masks.append([False] * prompt + [True] * n)
    masks[5][6:8] = [False, False]  # a tool's answer between two turns
    masks[9] = [False] * len(masks[9])  # a truncated sample that is left out of the loss
    masks[11][-2:] = [False, False]  # trained tokens end before the sequence does
    return ids, masks


def per_token(i: int, log_probs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-likelihood weighed by the sample's advantage, and an entropy bonus, [tokens], 0 where nothing is trained."""
    return mask * (-ADVANTAGES[i % 3] * log_probs - 0.1 * entropy)


def train(directory: str, parallel: dict[str, Any], batching: dict[str, Any], size: int, steps: int = 3) -> Any:
    """On a rank: (losses, gradient norms, first step's canonical gradients, weights, log-probs of the start), on rank 0."""
    import torch.distributed as dist

    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy
    from parallel.packing import Batching

    training = open_model(directory, parallel, True, lr=1e-3, eps=1e-4, clip_grad=0.0, distributed=False)
    policy = Policy(training, Exchange(), dist.get_world_size(), Batching(**batching))
    ids, masks = samples()
    count = sum(map(sum, masks))
    start, entropies = policy.log_probs(ids, size + 1, 0.8, masks)

    def loss(i: int, log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:
        value = per_token(i, log_probs, entropy, torch.tensor(masks[i])).sum() / count
        return value, value.detach()

    losses, norms, grads = [], [], None
    for _ in range(steps):
        reports, norm, _ = policy.update(ids, range(len(ids)), size, 0.8, loss, masks)
        losses.append(float(torch.stack(reports).double().sum()))
        norms.append(norm)
        if grads is None:  # the correction bias of routers is no parameter
            several = len(training.modules) > 1
            grads = gathered(training, {**training.tensors, **{(f"chunk{i}." if several else "") + n: p.main_grad
                                        for i, m in enumerate(training.modules) for n, p in m.named_parameters()}})
    weights = gathered(training, training.tensors)
    return (losses, norms, grads, weights, torch.cat(start), torch.cat(entropies)) if dist.get_rank() == 0 else None


def reference(directory: str) -> tuple[float, dict[str, torch.Tensor]]:
    """transformers: the same loss, one sample after the other, and its gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    ids, masks = samples()
    total = torch.zeros(())
    for i, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
        log_p = (model(torch.tensor([tokens])).logits[0, :-1] / 0.8).log_softmax(-1)
        log_probs = log_p.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        total = total + per_token(i, log_probs, -(log_p.exp() * log_p).sum(-1), torch.tensor(mask[1:])).sum() / sum(map(sum, masks))
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(got: Any, want: Any, name: str) -> None:
    """In fp32. A loss is a mean of terms of both signs: it rounds with their size, about 7, and not with its own.

    Eight units of rounding are allowed. In float64 the same runs have equal first losses, and gradients equal to 1e-7 (Megatron's
    norms stay fp32 there), and of the fp32 losses the padded one is the farthest from it, by two units.
    """
    sizes = [abs(ADVANTAGES[i % 3]) * row.abs().sum() for i, row in enumerate(want[4].split([len(s) for s in samples()[0]]))]
    size = float(sum(sizes)) / sum(map(sum, samples()[1]))
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), atol=8 * 2**-24 * size, rtol=0, msg=lambda m: f"loss, {name}: {m}")
    torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(want[1]), atol=0, rtol=1e-4, msg=lambda m: f"norm, {name}: {m}")
    for key, value in want[2].items():
        off = ((got[2][key] - value).abs().max() / value.abs().max().clamp_min(1e-12)).item()
        assert off < 2e-5, f"gradient of {key}, {name}: off by {off:.1e} of its largest"
    for key, value in want[3].items():
        torch.testing.assert_close(got[3][key], value, atol=2e-6, rtol=1e-4, msg=lambda m: f"weight {key}, {name}: {m}")
    for column in (4, 5):
        torch.testing.assert_close(got[column], want[column], atol=1e-4, rtol=0, msg=lambda m: f"log-probs or entropies, {name}: {m}")


PACKED, SHARED = dict(packing="packed"), dict(packing="shared_prompt")
SEQUENCE = dict(tp=2, sequence_parallel=True)
# world, parallel sizes, batching, sequences per micro-batch: every layout meets every packing in one family or the other
CASES: dict[str, list[tuple[int, dict[str, Any], dict[str, Any], int]]] = {
    "qwen2": [
        (1, {}, PACKED, 12), (1, {}, dict(SHARED, max_tokens=18), 1), (1, {}, dict(packing="padded", max_tokens=40), 1),
        (2, dict(tp=2), PACKED, 5), (2, SEQUENCE, SHARED, 6), (2, dict(pp=2), dict(SHARED, max_tokens=24), 1),
        (2, dict(pp=2, vpp=2), dict(PACKED, max_tokens=40), 1), (2, {}, dict(PACKED, max_tokens=20), 1), (4, dict(pp=2), SHARED, 2),
    ],
    "qwen3_moe": [(2, dict(SEQUENCE, ep=2, etp=1), PACKED, 5), (2, dict(pp=2), SHARED, 4)],
    "deepseek_v3": [(1, {}, SHARED, 12), (2, SEQUENCE, dict(PACKED, max_tokens=30), 1)],
    "gpt_oss": [(1, {}, SHARED, 12), (2, dict(ep=2), PACKED, 4)],
}


@pytest.mark.parametrize("family", CASES)
def test_every_packing_trains_the_same(family: str, tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", family, initializer_range=0.3, num_hidden_layers=4 if family == "qwen2" else 2))
    want = run_ranks(1, train, directory, {}, dict(packing="padded"), 3)[0]
    loss, gradients = reference(directory)
    assert want[0][0] == pytest.approx(loss, abs=1e-5)
    for key in want[2].keys() & gradients.keys():
        off = (want[2][key] - gradients[key]).abs().max() / gradients[key].abs().max()
        assert off < 1e-4, f"transformers' gradient of {key}: off by {off:.1e} of its largest"
    for world, parallel, batching, size in CASES[family]:
        close(run_ranks(world, train, directory, parallel, batching, size)[0], want, f"{family} {parallel} {batching} {size}")
