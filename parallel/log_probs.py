"""Log-probabilities and entropy of tokens from hidden states and a head that is cut over the vocabulary, a chunk of tokens at a time.

The logits of all tokens, [tokens, vocabulary] in fp32, are the largest thing a training step could hold. Here a bounded number of
chunks of them exists, whatever the number of tokens: the last ones are kept for the backward pass, which makes all others again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# fp32 logits of one chunk on one rank: 64 MiB beside a CPU's caches, 512 MiB where launches cost more than memory
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
# chunks kept for the backward pass: a CPU has memory to spare rather than time for a product
KEPT_CHUNKS = {"cpu": 4, "cuda": 1}
_NOTHING = -1e30  # the largest logit of a rank that holds padding rows only


class _HeadLogProbs(torch.autograd.Function):
    """log p(target) and entropy of softmax(hidden @ weight.T / temperature) over all ranks of a tensor-parallel group, with exact gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, first: int, temperature: float, group: Any, chunk: int,
                keep: int) -> tuple[Tensor, Tensor]:
        """`weight` holds the vocabulary from row `first` on, without padding rows. `keep` chunks stay for the backward pass."""
        parts: list[Tensor] = []
        kept: list[Tensor] = []
        scratch: Tensor | None = None
        chunks = list(_chunks(len(hidden), chunk))
        for i, rows in enumerate(chunks):
            logits = _logits(hidden[rows], weight, temperature)
            top = logits.amax(-1) if weight.shape[0] else logits.new_full(logits.shape[:1], _NOTHING)
            local, mine = _local(targets[rows], first, weight.shape[0])
            picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(mine, 0.0) if weight.shape[0] else torch.zeros_like(top)
            scratch = torch.empty_like(logits) if scratch is None else scratch
            exp = torch.exp(logits.sub_(top.unsqueeze(-1)), out=scratch[:len(logits)])
            z = exp.sum(-1)
            parts.append(torch.stack([top, z, exp.mul_(logits).sum(-1), picked]))
            if i >= len(chunks) - keep:
                kept += [logits, top]
        top, z, weighted, picked = torch.cat(parts, 1) if parts else hidden.new_zeros(4, 0, dtype=torch.float32)
        highest = _all_reduce(top.clone(), group, dist.ReduceOp.MAX)
        # every rank's sums to one shift; `weighted` is the sum of exp(logit - shift) x (logit - shift)
        shift = top - highest
        sums = torch.stack([z, weighted + shift * z, torch.zeros_like(z)]) * shift.exp()
        sums[2] = picked
        z, weighted, picked = _all_reduce(sums, group, dist.ReduceOp.SUM)
        log_z = z.log()
        log_probs, entropy = picked - highest - log_z, log_z - weighted / z
        ctx.save_for_backward(hidden, weight, targets, log_z + highest, entropy, *kept)
        ctx.first, ctx.temperature, ctx.chunk = first, temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, log_z, entropy, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_weight else None
        chunks = list(_chunks(len(hidden), ctx.chunk))
        for rows in reversed(chunks):
            if kept:
                top = kept.pop()
                log_p = kept.pop().sub_((log_z[rows] - top).unsqueeze(-1))
            else:
                log_p = _logits(hidden[rows], weight, ctx.temperature).sub_(log_z[rows].unsqueeze(-1))
            # d log p(target) / dx = onehot - p;  dH / dx = -p (log p + H)
            g = -grad_log_probs[rows].unsqueeze(-1)
            if grad_entropy is None:
                grad = log_p.exp_().mul_(g)
            else:
                h = grad_entropy[rows].unsqueeze(-1)
                grad = log_p.exp().mul_(log_p.mul_(-h).add_(g - h * entropy[rows].unsqueeze(-1)))
            if weight.shape[0]:
                local, mine = _local(targets[rows], ctx.first, weight.shape[0])
                grad.scatter_add_(-1, local.unsqueeze(-1), (grad_log_probs[rows] * mine).unsqueeze(-1))
            grad = (grad.div_(ctx.temperature) if ctx.temperature != 1.0 else grad).to(hidden.dtype)
            if wants_hidden:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[rows])
        return (grad_hidden if wants_hidden else None, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 6)


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(i, min(i + chunk, rows)) for i in range(0, rows, chunk))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _local(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank (any column where it is another's) and whether it is this rank's."""
    local = targets - first
    mine = (local >= 0) & (local < rows)
    return local.clamp(0, max(rows - 1, 0)), mine


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, summed in fp32."""
    if a.dtype == torch.float32:
        out.addmm_(a, b)
    else:
        out += a @ b


def _all_reduce(tensor: Tensor, group: Any, op: Any) -> Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def head_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, temperature: float = 1.0, group: Any = None,
                   chunk_elements: int | None = None) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies under softmax(hidden @ weight.T / temperature), natural log, fp32, both [tokens].

    hidden: [tokens, hidden_size], the same on all ranks of `group`; its gradient is this rank's part of a sum over them.
    weight: [padded_vocab / tp, hidden_size], this rank's contiguous vocabulary rows in rank order of `group`. Rows at or beyond
    `vocab_size` are padding and take no part. targets: [tokens] token ids. `chunk_elements` bounds the logits of a chunk; `KEPT_CHUNKS` of
    them are held.
    """
    first = (dist.get_rank(group) if group is not None else 0) * weight.shape[0]
    real = weight[:max(0, vocab_size - first)]
    chunk = max(1, (chunk_elements or CHUNK_ELEMENTS.get(hidden.device.type, 1 << 24)) // max(1, real.shape[0]))
    keep = KEPT_CHUNKS.get(hidden.device.type, 1) if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad) else 0
    return _HeadLogProbs.apply(hidden, real, targets, first, temperature, group, chunk, keep)
