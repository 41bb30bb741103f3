"""Segments of a packed row as batches for attention: those of like length side by side, each padded to the longest of its bucket.

One attention call per bucket and not per segment: rows of hundreds of short sequences would else spend their time on calls. Causality
keeps the padding, which repeats a segment's last token, out of real tokens; its outputs are dropped, so no gradient comes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.micro_batch import Segment

SHORT = 32  # tokens below which a call costs more than padding
FULL = 0.75  # a longer segment joins only a bucket that it fills so far


@dataclass(frozen=True)
class Bucket:
    """`count` segments of at most `length` tokens, all after the same `prefix` (start, length); its length is 0 where there is none."""

    count: int
    length: int
    prefix: tuple[int, int]


@dataclass(frozen=True)
class Buckets:
    """`index` [sum of count * length]: the row's token at every place of the buckets. `inverse` [tokens]: the place of every token.

    `padding`: the places that hold no token of their own. `edges`: lengths into which the row falls so that every prefix is a piece.
    """

    buckets: tuple[Bucket, ...]
    index: Tensor
    inverse: Tensor
    padding: Tensor
    edges: tuple[int, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, core: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Tensor:
        """q, k and v [tokens, heads, dim] -> [tokens, heads, v_head_dim]. `core` takes [count, heads, tokens, dim] and the prefix's length."""
        sizes = [b.count * b.length for b in self.buckets]
        q, k, v = (_Take.apply(x, self.index, self.inverse, None).split(sizes) for x in (query, key, value))
        starts = [sum(self.edges[:i]) for i in range(len(self.edges))]
        prompts = dict(zip(starts, zip(key.split(self.edges), value.split(self.edges), strict=True), strict=True)) if len(starts) > 1 else {}
        out = []
        for i, b in enumerate(self.buckets):
            one = [x[i].unflatten(0, (b.count, b.length)).transpose(1, 2) for x in (q, k, v)]
            if b.prefix[1]:
                before = (x.transpose(0, 1).unsqueeze(0).expand(b.count, -1, -1, -1) for x in prompts[b.prefix[0]])
                one[1:] = (torch.cat([x, y], 2) for x, y in zip(before, one[1:], strict=True))
            out.append(core(*one, b.prefix[1]).transpose(1, 2).flatten(0, 1))
        return _Take.apply(out[0] if len(out) == 1 else torch.cat(out), self.inverse, self.index, self.padding)


class _Take(torch.autograd.Function):
    """x[index] along dimension 0, whose gradient is that of `inverse`: a selection too, in place of a sum over what was selected.

    True where every element of x is selected once beside copies that get no gradient, and where those that are not selected are
    `padding`, which gets none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, padding: Tensor | None) -> Tensor:
        ctx.save_for_backward(inverse, padding)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inverse, padding = ctx.saved_tensors
        out = grad.index_select(0, inverse)
        return (out if padding is None or not len(padding) else out.index_fill_(0, padding, 0.0)), None, None, None


def make_buckets(segments: Sequence[Segment], tokens: int, device: torch.device | str) -> Buckets:
    """Buckets of a row of `tokens` tokens; the padding behind its segments is one more segment."""
    end = sum(s.length for s in segments)
    every = [*segments, Segment(end, tokens - end)] if end < tokens else list(segments)
    groups: list[list[Segment]] = []
    for s in sorted(every, key=lambda s: (s.prefix, -s.length, s.start)):
        longest = groups[-1][0] if groups else None
        if longest is None or longest.prefix != s.prefix or not (longest.length <= SHORT or s.length >= FULL * longest.length):
            groups.append([])
        groups[-1].append(s)
    index, padding, inverse = [], [], torch.empty(tokens, dtype=torch.long)
    place = 0
    for group in groups:
        longest_length = group[0].length
        for s in group:
            own = torch.arange(s.start, s.start + longest_length).clamp_(max=s.start + s.length - 1)
            index.append(own)
            inverse[s.start:s.start + s.length] = torch.arange(place, place + s.length)
            padding.append(torch.arange(place + s.length, place + longest_length))
            place += longest_length
    buckets = tuple(Bucket(len(g), g[0].length, g[0].prefix) for g in groups)
    return Buckets(buckets, torch.cat(index).to(device), inverse.to(device), torch.cat(padding).to(device), _edges(segments, tokens))


def _edges(segments: Sequence[Segment], tokens: int) -> tuple[int, ...]:
    cuts = sorted({0, tokens, *(x for s in segments if s.prefix[1] for x in (s.prefix[0], sum(s.prefix)))})
    return tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))
