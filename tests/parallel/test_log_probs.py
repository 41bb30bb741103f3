"""Chunked vocabulary-parallel log-probs and entropy equal torch's log_softmax, values and gradients, padding apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel import log_probs as module
from parallel.config import ParallelConfig
from parallel.log_probs import head_log_probs
from parallel.micro_batch import make_micro_batches
from tests.worker_pool import run_ranks


def split(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab: int, temperature: float, elements: int | None) -> Any:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    width = len(weight) // size
    hidden, mine = hidden.clone().requires_grad_(), weight[rank * width:(rank + 1) * width].clone().requires_grad_()
    log_probs, entropy = head_log_probs(hidden, mine, targets, vocab, temperature, dist.group.WORLD, elements)
    (log_probs.cos().sum() + (entropy * torch.arange(1, len(entropy) + 1)).sum()).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, mine.grad


@pytest.mark.parametrize("elements", [None, 900, 1])
def test_equal_to_log_softmax_at_any_tensor_parallel_size_and_chunk(elements: int | None) -> None:
    """One chunk, several with a ragged last one, and one row at a time. At tp 4 the last rank holds padding rows only."""
    generator = torch.Generator().manual_seed(0)
    vocab, padded = 165, 224
    hidden, weight = torch.randn(15, 12, generator=generator), torch.randn(padded, 12, generator=generator) * 2
    targets = torch.randint(0, vocab, (15,), generator=generator)
    for temperature in (1.0, 0.7):
        h, w = (x.clone().double().requires_grad_() for x in (hidden, weight))
        full = (h @ w[:vocab].t() / temperature).log_softmax(-1)
        want = full.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy = -(full.exp() * full).sum(-1)
        (want.cos().sum() + (entropy * torch.arange(1, 16)).sum()).backward()
        for size in (1, 2, 4):
            results = run_ranks(size, split, hidden, weight, targets, vocab, temperature, elements)
            for log_probs, got, _, _ in results:
                torch.testing.assert_close(log_probs.double(), want.detach(), atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(got.double(), entropy.detach(), atol=1e-5, rtol=1e-5)
            grad = torch.cat([g for *_, g in results])
            torch.testing.assert_close(grad.double(), w.grad, atol=1e-4, rtol=1e-4)
            assert grad[vocab:].abs().max() == 0
            torch.testing.assert_close(sum(g for _, _, g, _ in results).double(), h.grad, atol=1e-4, rtol=1e-4)


def test_far_logits_and_an_empty_batch_stay_finite() -> None:
    """Logits of 1e4 keep their log-probs: sums are shifted; nothing to predict gives empty results and zero gradients."""
    hidden, weight = torch.tensor([[1e4], [-1e4]]).requires_grad_(), torch.tensor([[1.0], [1.0], [0.9999]]).requires_grad_()
    log_probs, entropy = head_log_probs(hidden, weight, torch.tensor([0, 2]), 3)
    torch.testing.assert_close(log_probs.detach(), torch.tensor([-0.8620, -0.5514]), atol=2e-3, rtol=0)
    assert (entropy > 0).all()
    log_probs, entropy = head_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.long), 3)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,) and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(("kept", "again"), [(1, [200, 200]), (2, [200])])
def test_no_more_logits_than_a_chunk_exist_at_a_time(kept: int, again: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product with the head, in forward and backward, is of at most `chunk_elements` logits; the last chunks are not made twice."""
    made: list[int] = []
    original = module._logits
    monkeypatch.setattr(module, "KEPT_CHUNKS", {"cpu": kept})
    monkeypatch.setattr(module, "_logits", lambda hidden, weight, t: made.append(len(hidden) * len(weight)) or original(hidden, weight, t))
    hidden, weight = torch.randn(10, 4).requires_grad_(), torch.randn(50, 4).requires_grad_()
    head_log_probs(hidden, weight, torch.zeros(10, dtype=torch.long), 50, chunk_elements=200)[0].sum().backward()
    assert made == [200, 200, 100, *again]
    want = weight.detach().clone().requires_grad_()
    (hidden.detach() @ want.t()).log_softmax(-1)[:, 0].sum().backward()
    torch.testing.assert_close(weight.grad, want.grad)


def test_bfloat16_gradients_of_the_head_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(256, 16), torch.randn(40, 16), torch.randint(0, 40, (256,))
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        h, w = (x.bfloat16().to(dtype).requires_grad_() for x in (hidden, weight))
        head_log_probs(h, w, targets, 40, chunk_elements=160)[0].sum().backward()
        grads[dtype] = w.grad.float()
    off = (grads[torch.bfloat16] - grads[torch.float32]).abs().max() / grads[torch.float32].abs().max()
    assert off < 1e-2, off


@pytest.mark.parametrize("packing", ["padded", "packed", "shared_prompt"])
@pytest.mark.parametrize("sequence", [[1, 2, 3, 0], [1, 2, 3]])
def test_c07_a_tokens_log_prob_is_made_one_position_before_it(packing: Any, sequence: list[int]) -> None:
    """What is known of each position is given as a table of probabilities; another sequence stands before and after
    (../shared/cases: C07)."""
    table = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
    sequences = [[3, 3, 1, 2, 3], sequence, [1, 2, 2]]
    masks = [[False] * 2 + [True] * (len(ids) - 2) for ids in sequences]
    batch, = make_micro_batches(sequences, [range(3)], ParallelConfig(), packing, masks)
    # the hidden state of a position says which one it is, and the head reads the table there; what a mask leaves out is not predicted
    hidden = torch.nn.functional.one_hot(batch.positions.clamp(max=3).flatten(), 4).float()
    made, _ = head_log_probs(hidden[batch.rows], table.log().T.contiguous(), batch.targets, 4)
    got = batch.split(batch.per_token(made))[1]
    torch.testing.assert_close(got[1:], torch.tensor([-2.302585, -1.386294])[:len(sequence) - 2], atol=1e-6, rtol=0)
    assert got[0] == 0, "the prompt's second token"
