"""Vocabulary-parallel log-probs and entropy equal torch's log_softmax, values and gradients, padding apart."""

from __future__ import annotations

from typing import Any

import torch

from parallel.log_probs import vocab_parallel_log_probs
from tests.worker_pool import run_ranks


def split(logits: torch.Tensor, targets: torch.Tensor, vocab: int, temperature: float) -> Any:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    width = logits.shape[-1] // size
    mine = logits[..., rank * width:(rank + 1) * width].clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(mine, targets, vocab, temperature, dist.group.WORLD)
    (log_probs.cos().sum() + (entropy * torch.arange(1, entropy.numel() + 1).view_as(entropy)).sum()).backward()
    return log_probs.detach(), entropy.detach(), mine.grad


def test_equal_to_log_softmax_at_any_tensor_parallel_size() -> None:
    generator = torch.Generator().manual_seed(0)
    vocab, padded = 203, 224
    logits = torch.randn(3, 5, padded, generator=generator) * 4
    targets = torch.randint(0, vocab, (3, 5), generator=generator)
    for temperature in (1.0, 0.7):
        reference = logits.clone().double().requires_grad_()
        full = (reference[..., :vocab] / temperature).log_softmax(-1)
        want = full.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy = -(full.exp() * full).sum(-1)
        (want.cos().sum() + (entropy * torch.arange(1, 16).view(3, 5)).sum()).backward()
        for size in (1, 2, 4):
            results = run_ranks(size, split, logits, targets, vocab, temperature)
            for log_probs, h, _ in results:
                torch.testing.assert_close(log_probs.double(), want.detach(), atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(h.double(), entropy.detach(), atol=1e-5, rtol=1e-5)
            grad = torch.cat([g for _, _, g in results], -1)
            torch.testing.assert_close(grad.double(), reference.grad, atol=1e-5, rtol=1e-4)
            assert grad[..., vocab:].abs().max() == 0


def test_padding_takes_no_part_in_the_softmax() -> None:
    """203 real rows of equal logits: log-prob -ln 203 and entropy ln 203, whatever the padding rows hold."""
    logits = torch.zeros(1, 2, 224)
    logits[..., 203:] = 50.0
    log_probs, entropy = vocab_parallel_log_probs(logits, torch.tensor([[0, 202]]), 203)
    torch.testing.assert_close(log_probs, torch.full((1, 2), -5.313206))
    torch.testing.assert_close(entropy, torch.full((1, 2), 5.313206))
