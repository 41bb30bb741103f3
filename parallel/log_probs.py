"""Log-probabilities and entropy of tokens from logits that are cut over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelLogProbs(torch.autograd.Function):
    """log p(target) and entropy of softmax(logits) over all ranks of a tensor-parallel group, with exact gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
        top = logits.max(dim=-1).values
        _all_reduce(top, group, dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(-1)
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[-1])
        picked = shifted.gather(-1, local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        picked = torch.where(mine, picked, torch.zeros_like(picked))
        exp = shifted.exp()
        # padding columns are -inf: their weight is 0 and their product with -inf must be 0 too
        sums = torch.stack([exp.sum(-1), torch.where(exp > 0, exp * shifted, 0.0).sum(-1), picked])
        _all_reduce(sums, group, dist.ReduceOp.SUM)
        log_z = sums[0].log()
        log_probs, entropy = sums[2] - log_z, log_z - sums[1] / sums[0]
        probs = exp.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(probs, local, mine, entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        probs, local, mine, entropy = ctx.saved_tensors
        grad = -probs * grad_log_probs.unsqueeze(-1)
        grad.scatter_add_(-1, local.clamp(0, probs.shape[-1] - 1).unsqueeze(-1), (grad_log_probs * mine).unsqueeze(-1))
        if grad_entropy.any():
            # dH/dx = -p (log p + H)
            log_p = torch.where(probs > 0, probs.log(), 0.0)
            grad -= probs * (log_p + entropy.unsqueeze(-1)) * grad_entropy.unsqueeze(-1)
        return grad, None, None, None


def _all_reduce(tensor: Tensor, group: Any, op: Any) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)


def vocab_parallel_log_probs(logits: Tensor, targets: Tensor, vocab_size: int, temperature: float = 1.0,
                             group: Any = None) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies under softmax(logits / temperature), natural log, fp32.

    logits: [..., padded_vocab / tp], this rank's contiguous vocabulary rows in rank order of `group`.
    targets: [...] token ids. Rows at or beyond `vocab_size` are padding and take no part.
    """
    rank = dist.get_rank(group) if group is not None else 0
    width = logits.shape[-1]
    first = rank * width
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    if first + width > vocab_size:
        real = torch.arange(first, first + width, device=logits.device) < vocab_size
        scaled = scaled.masked_fill(~real, float("-inf"))
    return _VocabParallelLogProbs.apply(scaled, targets, first, group)
