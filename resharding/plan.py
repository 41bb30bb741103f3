"""The copies that turn source layouts into destination layouts: pure geometry, the same on every rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from resharding.boxes import Box, at, first_overlap, inside, intersect, subtract_all, volume, whole
from resharding.errors import CoverageError, listed
from resharding.layout import Layout, LocalTensor


@dataclass(frozen=True)
class Copy:
    """One region of one canonical tensor on its way. `dtype` is the destination's: the source casts before it sends."""

    src_rank: int
    src_tensor: str
    src_box: Box
    dst_rank: int
    dst_tensor: str
    dst_box: Box
    canonical: str
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return volume(self.dst_box) * self.dtype.itemsize


@dataclass(frozen=True)
class Padding:
    """A region of a destination tensor that belongs to no canonical tensor and is filled with zeros."""

    rank: int
    tensor: str
    box: Box


@dataclass(frozen=True, eq=False)  # compared and cached by identity: plans are big and built once
class Plan:
    """Copies in canonical order (so that a prefix of them is spread over all ranks) and paddings."""

    copies: tuple[Copy, ...]
    paddings: tuple[Padding, ...]

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes that travel between ranks, in the destination dtype."""
        return sum(c.nbytes for c in self.copies if c.src_rank != c.dst_rank)

    @cached_property
    def bytes_written(self) -> int:
        """Bytes written into destination tensors on all ranks, padding aside."""
        return sum(c.nbytes for c in self.copies)

    @cached_property
    def bytes_sent(self) -> Counter[int]:
        """Bytes that each rank sends to others."""
        sent: Counter[int] = Counter()
        for copy in self.copies:
            if copy.src_rank != copy.dst_rank:
                sent[copy.src_rank] += copy.nbytes
        return sent


@dataclass(frozen=True)
class _Holder:
    rank: int
    tensor: LocalTensor
    offset: tuple[int, ...]


Holders = dict[str, dict[Box, list[_Holder]]]  # canonical name -> distinct region -> who holds it, and where


def make_plan(sources: Sequence[Layout], destinations: Sequence[Layout], shapes: Mapping[str, tuple[int, ...]],
              source_is_everywhere: bool = False, read_all: bool = True) -> Plan:
    """Plan the copies from `sources` to `destinations`; `shapes` are the canonical tensors (name to full shape).

    Among replicas of a region a destination takes its own rank's, else that of the rank that has sent least so far.
    `source_is_everywhere`: every rank can read the source itself (files), so nothing travels. `read_all=False` allows
    destinations that do not need every canonical tensor (one rank of many, a critic without the head).
    Raises CoverageError that names the tensors where a destination element would be written never or twice, or a canonical
    tensor would not be read whole.
    """
    held, wanted = _holders(sources, shapes), _holders(destinations, shapes)
    _check_tiling(destinations)
    sent: Counter[int] = Counter()
    copies: list[Copy] = []
    missing: list[str] = []
    unread: list[str] = []
    for canonical, shape in shapes.items():
        left = [whole(shape)]
        for region, places in wanted.get(canonical, {}).items():
            left = subtract_all(left, region)
            for place in places:
                complete = _cover(canonical, region, place, held.get(canonical, {}), source_is_everywhere, sent, copies)
                if not complete:
                    missing.append(f"{canonical} (for {place.tensor.name} on rank {place.rank})")
        if left and read_all:
            unread.append(canonical)
    problems = [f"no source holds all of {listed(missing)}"] if missing else []
    problems += [f"no destination takes all of {listed(unread)}"] if unread else []
    if problems:
        raise CoverageError("the plan does not cover the model: " + "; ".join(problems))
    paddings = tuple(Padding(layout.rank, local.name, piece.place)
                     for layout in destinations for local in layout.tensors for piece in local.pieces if piece.canonical is None)
    return Plan(tuple(copies), paddings)


def _holders(layouts: Sequence[Layout], shapes: Mapping[str, tuple[int, ...]]) -> Holders:
    out: Holders = defaultdict(lambda: defaultdict(list))
    for layout in layouts:
        for local in layout.tensors:
            for piece in local.pieces:
                if piece.canonical is None:
                    continue
                if piece.canonical not in shapes or not inside(piece.region, whole(shapes[piece.canonical])):
                    raise CoverageError(f"{layout.kind} tensor {local.name} on rank {layout.rank} holds {piece.canonical} {piece.region}, "
                                        f"but the model's tensor is {shapes.get(piece.canonical, 'unknown')}")
                if volume(piece.region):
                    out[piece.canonical][piece.region].append(_Holder(layout.rank, local, piece.offset))
    return out


def _check_tiling(destinations: Sequence[Layout]) -> None:
    for layout in {id(layout.tensors): layout for layout in destinations}.values():  # replicas share their description
        names = Counter(local.name for local in layout.tensors)
        if twice := [name for name, count in names.items() if count > 1]:
            raise CoverageError(f"{layout.kind} rank {layout.rank} lists {listed(twice)} more than once")
        for local in layout.tensors:
            places = tuple(piece.place for piece in local.pieces)
            where = f"{layout.kind} tensor {local.name} {local.shape} on rank {layout.rank}"
            if outside := [p for p in places if not inside(p, whole(local.shape))]:
                raise CoverageError(f"{where}: the piece at {outside[0]} lies outside it")
            if overlap := first_overlap(places):
                raise CoverageError(f"{where}: elements would be written twice, by the pieces at {overlap[0]} and {overlap[1]}")
            if sum(map(volume, places)) != volume(whole(local.shape)):
                raise CoverageError(f"{where}: its pieces leave elements unwritten")


def _cover(canonical: str, region: Box, place: _Holder, held: Mapping[Box, list[_Holder]], everywhere: bool, sent: Counter[int],
           copies: list[Copy]) -> bool:
    """Append the copies that fill `region` at `place`; False where the sources do not hold all of it."""
    own_first = sorted(held, key=lambda box: all(h.rank != place.rank for h in held[box]))
    remaining = [region]
    for source_region in own_first:
        for box in remaining:
            common = intersect(box, source_region)
            if common is None:
                continue
            holders = held[source_region]
            holder = holders[0] if everywhere else min(holders, key=lambda h: (h.rank != place.rank, sent[h.rank], h.rank))
            copy = Copy(place.rank if everywhere else holder.rank, holder.tensor.name, _local(common, source_region, holder.offset),
                        place.rank, place.tensor.name, _local(common, region, place.offset), canonical, place.tensor.dtype)
            copies.append(copy)
            if copy.src_rank != copy.dst_rank:
                sent[copy.src_rank] += copy.nbytes
        remaining = subtract_all(remaining, source_region)
        if not remaining:
            return True
    return not remaining


def _local(part: Box, region: Box, offset: tuple[int, ...]) -> Box:
    """Where `part` of the canonical tensor sits in a local tensor that holds `region` at `offset`."""
    return at([o + p[0] - r[0] for o, p, r in zip(offset, part, region, strict=True)], part)
