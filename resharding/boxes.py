"""Geometry of half-open boxes: one (start, stop) pair per tensor dimension."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements (1 for the box of a scalar)."""
    return math.prod(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def at(offset: Sequence[int], box: Box) -> Box:
    """A box of the shape of `box` that starts at `offset`."""
    return tuple((o, o + stop - start) for o, (start, stop) in zip(offset, box, strict=True))


def inside(inner: Box, outer: Box) -> bool:
    return len(inner) == len(outer) and all(a <= c <= d <= b for (a, b), (c, d) in zip(outer, inner))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part, or None where there is none."""
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(start < stop for start, stop in out) else None


def subtract(a: Box, b: Box) -> list[Box]:
    """`a` without `b`, as disjoint boxes."""
    common = intersect(a, b)
    if common is None:
        return [a]
    out, rest = [], list(a)
    for dim, (start, stop) in enumerate(common):
        low, high = rest[dim]
        for part in ((low, start), (stop, high)):
            if part[0] < part[1]:
                out.append((*rest[:dim], part, *rest[dim + 1:]))
        rest[dim] = (start, stop)
    return out


def subtract_all(boxes: list[Box], cut: Box) -> list[Box]:
    return [part for box in boxes for part in subtract(box, cut)]


def outermost(boxes: Collection[Box]) -> list[Box]:
    """The boxes that lie inside no other."""
    return [box for box in boxes if not any(box != other and inside(box, other) for other in boxes)]


@lru_cache(maxsize=4096)  # layers repeat the same few arrangements
def first_overlap(boxes: tuple[Box, ...]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element, or None."""
    boxes = tuple(sorted(box for box in boxes if volume(box)))
    for i, box in enumerate(boxes):
        for other in boxes[i + 1:]:
            if other and other[0][0] >= box[0][1]:
                break  # sorted by dimension 0: no later box can reach back
            if intersect(box, other):
                return box, other
    return None
