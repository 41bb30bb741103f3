"""Copies between two ranks put together into messages of at most a bucket. Both ends make the same messages from their own plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from parallel.errors import UserError
from resharding.boxes import Box, at, shape_of, slices
from resharding.plan import Copy
from resharding.transform import CAST, Transform

ALIGNMENT = 16  # bytes between the copies of a message, so that each can be viewed in its own dtype
ALONE = 1 << 20  # a copy of so many bytes is a message of its own, which may go straight from tensor to tensor
SMALLEST_BUCKET = ALIGNMENT  # bytes; one element of any dtype fits
BUCKET = 64 << 20  # bytes, where the caller does not choose
COMPUTED = 1 << 20  # bytes that a transform computes at a time: what it needs for that stays small, and in the cache
BLOCK = 128  # rows of a canonical tensor that share a scale in block-quantised FP8: a cut inside them costs the transform more

Pairs = Collection[tuple[int, int]]  # (source rank, destination rank)


@dataclass(frozen=True, eq=False)
class Message:
    """What one rank sends another at once. `part` counts the messages of the pair."""

    src: int
    dst: int
    part: int
    copies: tuple[Copy, ...]

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Ranks go through their messages in rising order of keys, which is the same on both ends of each."""
        return self.copies[0].order, self.part, self.src, self.dst

    @cached_property
    def nbytes(self) -> int:
        return self.copies[0].nbytes if len(self.copies) == 1 else sum(map(_aligned, self.copies))

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[Copy, torch.Tensor]]:
        """Each copy with its part of a `buffer` of bytes, in its dtype and shape."""
        position = 0
        for copy in self.copies:
            yield copy, buffer[position:position + copy.nbytes].view(copy.dtype).view(shape_of(copy.dst_box))
            position += _aligned(copy)


def messages_of(copies: Sequence[Copy], rank: int, bucket_bytes: int) -> list[Message]:
    """The messages that `rank` sends or receives, in the order in which it must go through them.

    Why nobody waits for ever: keys are the same on both ends and every rank takes its messages in rising order, so the
    unfinished message with the smallest key of all is the next one of both its ends. Raises UserError for a bucket below
    16 bytes.
    """
    if bucket_bytes < SMALLEST_BUCKET:
        raise UserError(f"bucket_bytes is {bucket_bytes}; it must be at least {SMALLEST_BUCKET}")
    by_pair: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in copies:
        if rank in (copy.src_rank, copy.dst_rank) and copy.src_rank != copy.dst_rank:
            by_pair[copy.src_rank, copy.dst_rank] += split(copy, bucket_bytes)
    found = [Message(src, dst, part, group) for (src, dst), mine in by_pair.items() for part, group in enumerate(_groups(mine, bucket_bytes))]
    return sorted(found, key=lambda message: message.key)


def _groups(copies: Sequence[Copy], bucket_bytes: int) -> Iterator[tuple[Copy, ...]]:
    """Large copies by themselves, small ones together as long as they fit."""
    group: list[Copy] = []
    size = 0
    for copy in copies:
        if group and (copy.nbytes >= ALONE or size + _aligned(copy) > bucket_bytes):
            yield tuple(group)
            group, size = [], 0
        if copy.nbytes >= ALONE:
            yield (copy,)
        else:
            group.append(copy)
            size += _aligned(copy)
    if group:
        yield tuple(group)


def _aligned(copy: Copy) -> int:
    return -(-copy.nbytes // ALIGNMENT) * ALIGNMENT


def split(copy: Copy, limit: int) -> list[Copy]:
    """The copy in slabs of at most `limit` bytes each, cut along as few dimensions as it takes."""
    if copy.nbytes <= limit:
        return [copy]
    dim = next(d for d, size in enumerate(shape_of(copy.dst_box)) if size > 1)
    size = shape_of(copy.dst_box)[dim]
    step = max(1, limit // (copy.nbytes // size))
    start = copy.region[dim][0]
    cuts = [0]
    while cuts[-1] < size:
        end = cuts[-1] + step
        if step >= BLOCK and end < size:
            end -= (start + end) % BLOCK
        cuts.append(min(end, size))
    return [part for low, high in zip(cuts, cuts[1:]) for part in split(_slab(copy, dim, low, high), limit)]


def fill(target: torch.Tensor, copy: Copy, source: Mapping[str, Any], transform: Transform) -> None:
    """Write what the transform reads for `copy` into `target`, of the shape of its boxes."""
    for slab in [copy] if transform is CAST else split(copy, COMPUTED):
        target[slices(inside_of(slab, copy))].copy_(transform.read(slab, source))


def inside_of(slab: Copy, copy: Copy) -> Box:
    """Where a slab of the copy sits in it."""
    return at([low - start for (low, _), (start, _) in zip(slab.dst_box, copy.dst_box)], slab.dst_box)


def _slab(copy: Copy, dim: int, low: int, high: int) -> Copy:
    """Rows [low, high) of the copy along `dim`."""
    def cut(box: Box) -> Box:
        return (*box[:dim], (box[dim][0] + low, box[dim][0] + high), *box[dim + 1:])

    return copy._replace(src_box=cut(copy.src_box), dst_box=cut(copy.dst_box), region=cut(copy.region))
