"""Context parallelism: every sequence is cut over cp ranks in chunks of equal work, and what is predicted comes back whole.

Rank r of cp holds chunks r and 2 cp - 1 - r of the 2 cp equal chunks of every sequence, an early and a late one, so that causal
attention is the same work for all (the convention of Megatron-Core and Transformer Engine). Sequences are padded to a multiple of
2 cp where they are laid out (`parallel.micro_batch`), and targets are taken there, before anything is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.micro_batch import MicroBatch


def held_columns(lengths: Sequence[int], cp: int) -> Tensor:
    """Columns of a row that each rank holds, [cp, tokens / cp], for sequences of padded `lengths` (multiples of 2 cp) that fill the row."""
    return _held_columns(tuple(lengths), cp)


@lru_cache(maxsize=64)
def _held_columns(lengths: tuple[int, ...], cp: int) -> Tensor:
    held: list[list[Tensor]] = [[] for _ in range(cp)]
    start = 0
    for length in lengths:
        if length % (2 * cp):
            raise ValueError(f"a sequence of {length} tokens is not cut over cp {cp}: it must be padded to a multiple of {2 * cp}")
        chunks = torch.arange(start, start + length).chunk(2 * cp) if length else ()
        for rank in range(cp if length else 0):
            held[rank] += [chunks[rank], chunks[2 * cp - 1 - rank]]
        start += length
    return torch.stack([torch.cat(parts) if parts else torch.empty(0, dtype=torch.long) for parts in held])


def sequence_lengths(micro_batch: MicroBatch) -> tuple[int, ...]:
    """Padded lengths of the sequences that fill a row, the tail of a packed row as one more."""
    width = micro_batch.tokens.shape[1]
    lengths = () if micro_batch.segments is None else tuple(s.length for s in micro_batch.segments)
    return (*lengths, width - sum(lengths))


@dataclass(frozen=True)
class Whole:
    """How the predictions of all ranks make the micro-batch's: `order` are the whole's indices of rank 0's, then rank 1's, ...;
    `counts` says how many each has."""

    order: Tensor
    counts: tuple[int, ...]
    rank: int
    group: Any

    def __call__(self, values: Tensor) -> Tensor:
        """This rank's values [predictions of this rank, ...] -> all, [predictions, ...], on every rank of the group (a collective).

        Every rank makes the whole loss of them, so that the gradient is the same on all. Each takes that of its own predictions,
        once: the reduction over DP x CP, which follows, adds what the ranks' tokens contribute.
        """
        return _GatherPredictions.apply(values, self)


class _GatherPredictions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, whole: Whole) -> Tensor:
        ctx.whole = whole
        padded = values.new_zeros(max(1, *whole.counts), *values.shape[1:])
        padded[:len(values)] = values
        parts = [torch.empty_like(padded) for _ in whole.counts]
        dist.all_gather(parts, padded, group=whole.group)
        out = values.new_empty(len(whole.order), *values.shape[1:])
        out[whole.order] = torch.cat([part[:n] for part, n in zip(parts, whole.counts, strict=True)])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        whole: Whole = ctx.whole
        return grad[whole.order.split(whole.counts)[whole.rank]], None


def cut(micro_batch: MicroBatch, group: Any) -> tuple[MicroBatch, Whole]:
    """This rank's part of a micro-batch, and how its predictions become whole.

    The part has this rank's tokens and positions [rows, tokens / cp], and the `rows` (in those tokens) and `targets` of the
    predictions made from them; its segments are the whole row's.
    """
    cp, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens, device = micro_batch.tokens, micro_batch.tokens.device
    width = tokens.shape[1]
    columns = held_columns(sequence_lengths(micro_batch), cp).to(device)
    owner, place = (torch.empty(width, dtype=torch.long, device=device) for _ in range(2))
    owner[columns] = torch.arange(cp, device=device)[:, None].expand_as(columns)
    place[columns] = torch.arange(width // cp, device=device).expand_as(columns)
    row, column = micro_batch.rows // width, micro_batch.rows % width
    by_rank = [(owner[column] == r).nonzero().flatten() for r in range(cp)]
    mine = by_rank[rank]
    part = replace(micro_batch, tokens=tokens[:, columns[rank]], positions=micro_batch.positions[:, columns[rank]],
                   rows=row[mine] * (width // cp) + place[column[mine]], targets=micro_batch.targets[mine])
    return part, Whole(torch.cat(by_rank), tuple(len(i) for i in by_rank), rank, group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor, group: Any) -> Tensor:
        ctx.columns, ctx.group = columns, group
        x = x.contiguous()
        out = x.new_empty(columns.numel(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x, group=group)
        return out[torch.argsort(columns.flatten())]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        out = grad.new_empty(ctx.columns.shape[1], *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad[ctx.columns.flatten()], group=ctx.group)
        return out, None, None


def gather_tokens(x: Tensor, columns: Tensor, group: Any) -> Tensor:
    """[tokens / cp, ...] of every rank -> [tokens, ...] in the order of the sequences (a collective; its backward sums over the ranks)."""
    return _GatherTokens.apply(x, columns, group)


def as_megatron_cuts(positions: Tensor, cp: int, rank: int) -> Tensor:
    """Positions [tokens / cp] of this rank's tokens, at the places [tokens] that Megatron's rotary embedding takes them from.

    Megatron is told of one sequence in the row, and takes that sequence's chunks `rank` and 2 cp - 1 - rank.
    """
    if cp == 1:
        return positions
    half = len(positions) // 2
    out = positions.new_zeros(cp * len(positions))
    out[rank * half:(rank + 1) * half] = positions[:half]
    end = len(out) - rank * half
    out[end - half:end] = positions[half:]
    return out
