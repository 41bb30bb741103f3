"""The copies that turn source layouts into destination layouts: pure geometry, the same on every rank, no tensor touched.

A rank plans only its own part: the copies that it sends, receives or makes in place. What the others do need not be known, because
who sends what is a function of the two parties alone (`resharding.senders`), and because copies are made in one order everywhere.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from resharding.boxes import Box, at, first_overlap, inside, intersect, outermost, volume, whole
from resharding.errors import CoverageError, listed
from resharding.layout import IDENTITY, Layout, Listed, LocalTensor, Party, Piece, View
from resharding.senders import Senders, senders
from resharding.tiling import covered, tiling_fault

Blocks = Sequence[Mapping[str, tuple[int, ...]]]


class Copy(NamedTuple):
    """One region of one canonical tensor on its way. `dtype` is the destination's: the source casts before it sends.

    Boxes are in the coordinates of the views. `order` rises with the position in the plan, and is the same on all ranks.
    """

    src_rank: int
    src_tensor: str
    src_box: Box
    dst_rank: int
    dst_tensor: str
    dst_box: Box
    canonical: str
    dtype: torch.dtype
    region: Box
    order: int = 0
    src_view: View = IDENTITY
    dst_view: View = IDENTITY

    @property
    def nbytes(self) -> int:
        return volume(self.dst_box) * self.dtype.itemsize


class Padding(NamedTuple):
    """A region of a destination tensor that belongs to no canonical tensor and is filled with zeros."""

    rank: int
    tensor: str
    box: Box
    view: View = IDENTITY


@dataclass(frozen=True, eq=False)  # compared and cached by identity: plans are big and built once
class Plan:
    """Copies in canonical order (so that a prefix of them is spread over all ranks) and paddings, of `rank` or (None) of all ranks."""

    copies: tuple[Copy, ...]
    paddings: tuple[Padding, ...]
    rank: int | None = None
    _cache: dict[object, object] = field(default_factory=dict, repr=False)

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes that travel between ranks, in the destination dtype."""
        return sum(c.nbytes for c in self.copies if c.src_rank != c.dst_rank)

    @cached_property
    def bytes_written(self) -> int:
        """Bytes written into destination tensors (of `rank`, or of all ranks), padding aside."""
        return sum(c.nbytes for c in self.copies if self.rank in (None, c.dst_rank))

    @cached_property
    def bytes_sent(self) -> Counter[int]:
        """Bytes that each rank sends to others."""
        return self._count(lambda c: c.src_rank)

    @cached_property
    def bytes_received(self) -> Counter[int]:
        """Bytes that each rank receives from others."""
        return self._count(lambda c: c.dst_rank)

    def _count(self, key: Callable[[Copy], int]) -> Counter[int]:
        out: Counter[int] = Counter()
        for copy in self.copies:
            if copy.src_rank != copy.dst_rank:
                out[key(copy)] += copy.nbytes
        return out


class _Held(NamedTuple):
    """One region of a canonical tensor at the sources: every rank that holds it, and where."""

    region: Box
    ranks: tuple[int, ...]
    where: dict[int, tuple[LocalTensor, Piece]]


def make_plan(sources: Party | Sequence[Layout], destinations: Party | Sequence[Layout], shapes: Mapping[str, tuple[int, ...]] | Blocks,
              source_is_everywhere: bool = False, read_all: bool = True, rank: int | None = None,
              host_of: Callable[[int], int] = lambda rank: rank // 8) -> Plan:
    """Plan the copies from `sources` to `destinations`: those of `rank`, or (None) of all ranks.

    `shapes` are the canonical tensors (name to full shape), in one mapping or block by block as the parties number them. Among
    replicas of a region a destination takes its own rank's, else one on its host (`host_of` a rank), else any; senders share the work.
    `source_is_everywhere`: every rank can read the source itself (files), so nothing travels. `read_all=False` allows
    destinations that do not need every canonical tensor (one rank of many, a critic without the head).
    Raises CoverageError that names the tensors where an element of a planned destination would be written never or twice, or a
    canonical tensor would not be read whole; the plan of one rank looks at what that rank holds and wants.
    """
    blocks: Blocks = [shapes] if isinstance(shapes, Mapping) else shapes
    names = [block.keys() for block in blocks]
    source = Listed(sources, names) if isinstance(sources, Sequence) else sources
    destination = Listed(destinations, names) if isinstance(destinations, Sequence) else destinations
    planner = _Planner(source, destination, {name for block in blocks for name in block}, source_is_everywhere, rank, host_of)
    with _without_collection():
        for number, block in enumerate(blocks):
            planner.add(number, block)
    _refuse(planner.missing, planner.unread if read_all else [])
    return Plan(tuple(planner.copies), tuple(planner.paddings), rank)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No cyclic garbage collection: a plan makes many small objects and no cycles, and looking through them costs a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def copied_regions(source: Party, destination: Party, blocks: Blocks,
                   host_of: Callable[[int], int]) -> Iterator[tuple[str, int, Senders]]:
    """(canonical tensor, bytes, who sends it to whom) of every region that the plan of all ranks moves, without its copies.

    Raises CoverageError where a destination is not filled or a canonical tensor is left unread.
    """
    planner = _Planner(source, destination, {name for block in blocks for name in block}, False, None, host_of, regions_only=True)
    for number, block in enumerate(blocks):
        planner.add(number, block)
        yield from planner.regions
        planner.regions.clear()
    _refuse(planner.missing, planner.unread)


def _refuse(missing: list[str], unread: list[str]) -> None:
    problems = [f"no source holds all of {listed(missing)}"] if missing else []
    problems += [f"no destination takes all of {listed(unread)}"] if unread else []
    if problems:
        raise CoverageError("the plan does not cover the model: " + "; ".join(problems))


class _Planner:
    """Walks the blocks once and collects copies, paddings and what is not covered."""

    def __init__(self, source: Party, destination: Party, known: set[str], everywhere: bool, rank: int | None,
                 host_of: Callable[[int], int], regions_only: bool = False) -> None:
        self.regions: list[tuple[str, int, Senders]] = []
        self.regions_only = regions_only
        self.source, self.destination, self.known = source, destination, known
        self.everywhere, self.rank, self.host_of = everywhere, rank, host_of
        self.copies: list[Copy] = []
        self.paddings: list[Padding] = []
        self.missing: list[str] = []
        self.unread: list[str] = []
        self._seen: dict[tuple[int, str], LocalTensor] = {}

    def add(self, number: int, block: Mapping[str, tuple[int, ...]]) -> None:
        held = self._held(number, block)
        # another rank's tensor matters to this one only as far as it holds what goes into it
        given = {name for name, parts in held.items() if any(self.rank in part.where for part in parts)} if self.rank is not None else set(block)
        taken: dict[str, list[Box]] = defaultdict(list)
        for i, shard in enumerate(self.destination.shards(number)):
            mine = self.rank is None or self.rank in shard.ranks
            if not mine and not given:
                continue
            new = mine and self._is_new(shard.tensor, shard.ranks)
            for j, piece in enumerate(shard.tensor.pieces):
                if piece.canonical is None:
                    self.paddings += [Padding(r, shard.tensor.name, piece.place, piece.view) for r in self._own(shard.ranks) if new]
                elif (mine or piece.canonical in given) and self._belongs(self.destination, shard.tensor, shard.ranks, piece, block):
                    taken[piece.canonical].append(piece.region)
                    if volume(piece.region):
                        self._fill(shard.tensor, piece, shard.ranks, held.get(piece.canonical, ()), number << 44 | i << 24 | j)
        self.unread += [name for name, shape in block.items()
                        if (name in given or name not in held) and not covered(tuple(taken.get(name, ())), shape)]

    def _held(self, number: int, block: Mapping[str, tuple[int, ...]]) -> dict[str, list[_Held]]:
        """Who holds which regions of the block's canonical tensors. Distinct regions of one tensor must be disjoint, but a copy
        of part of another (a tied head beside a whole embedding) is left aside."""
        regions: dict[str, dict[Box, dict[int, tuple[LocalTensor, Piece]]]] = {}
        for shard in self.source.shards(number):
            if self._own(shard.ranks):
                self._check_tiling(self.source, shard.tensor, shard.ranks)
            for piece in shard.tensor.pieces:
                if piece.canonical is not None and self._belongs(self.source, shard.tensor, shard.ranks, piece, block) and volume(piece.region):
                    where = regions.setdefault(piece.canonical, {}).setdefault(piece.region, {})
                    where.update(dict.fromkeys(shard.ranks, (shard.tensor, piece)))
        for canonical, held in regions.items():
            if len(held) > 1 and first_overlap(tuple(held)):
                held = regions[canonical] = {region: held[region] for region in outermost(held)}
            if len(held) > 1 and (overlap := first_overlap(tuple(held))):
                raise CoverageError(f"{canonical}: the sources hold {overlap[0]} and {overlap[1]}, which overlap without being the same")
        return {name: [_Held(region, tuple(where), where) for region, where in held.items()] for name, held in regions.items()}

    def _belongs(self, party: Party, tensor: LocalTensor, ranks: Sequence[int], piece: Piece, block: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the piece is part of this block (a tensor may hold several). Raises CoverageError for one of no canonical tensor."""
        shape = block.get(piece.canonical or "")
        if shape is None and piece.canonical in self.known:
            return False
        if shape is None or not inside(piece.region, whole(shape)):
            raise CoverageError(f"{party.kind} tensor {tensor.name} on rank {ranks[0]} holds {piece.canonical} {piece.region}, "
                                f"but the model's tensor is {shape or 'unknown'}")
        return True

    def _own(self, ranks: Sequence[int]) -> Sequence[int]:
        return ranks if self.rank is None else (self.rank,) if self.rank in ranks else ()

    def _is_new(self, tensor: LocalTensor, ranks: Sequence[int]) -> bool:
        """Note a destination tensor and check it when it is first met. Raises CoverageError where its pieces do not tile it."""
        known = [self._seen.setdefault((rank, tensor.name), tensor) for rank in self._own(ranks) if (rank, tensor.name) in self._seen]
        if any(other is not tensor for other in known) or len(set(ranks)) < len(ranks):
            raise CoverageError(f"{self.destination.kind} rank {ranks[0]} lists {tensor.name} more than once")
        if known:
            return False
        self._seen.update(dict.fromkeys(((rank, tensor.name) for rank in self._own(ranks)), tensor))
        self._check_tiling(self.destination, tensor, ranks)
        return True

    def _check_tiling(self, party: Party, tensor: LocalTensor, ranks: Sequence[int]) -> None:
        if fault := tiling_fault(tensor.shape, tuple((piece.place, piece.view) for piece in tensor.pieces)):
            raise CoverageError(f"{party.kind} tensor {tensor.name} {tensor.shape} on rank {ranks[0]}: {fault}")

    def _fill(self, tensor: LocalTensor, piece: Piece, ranks: tuple[int, ...], held: Sequence[_Held], order: int) -> None:
        """Copies of one destination piece, for every rank that has it."""
        remaining = volume(piece.region)
        for source in held:
            common = piece.region if piece.region == source.region else intersect(piece.region, source.region)
            if common is None:
                continue
            remaining -= volume(common)
            if self.regions_only:
                pairs = senders(ranks, source.ranks, self.host_of, order % 4093)
                self.regions.append((piece.canonical or "", volume(common) * tensor.dtype.itemsize, pairs))
                continue
            target, last, origin = _local(common, piece.region, piece.offset), None, ()
            for src, dst in self._pairs(ranks, source.ranks, order):
                held_in, source_piece = source.where[source.ranks[0] if self.everywhere else src]
                if source_piece is not last:
                    origin, last = _local(common, source.region, source_piece.offset), source_piece
                self.copies.append(Copy(src, held_in.name, origin, dst, tensor.name, target, piece.canonical or "", tensor.dtype, common, order,
                                        source_piece.view, piece.view))
        if remaining:
            self.missing += [f"{piece.canonical} (for {tensor.name} on rank {rank})" for rank in self._own(ranks)]

    def _pairs(self, wanting: tuple[int, ...], holding: tuple[int, ...], order: int) -> Sequence[tuple[int, int]]:
        """(source rank, destination rank) of the copies of one region that this plan is about."""
        if self.everywhere:
            return [(rank, rank) for rank in self._own(wanting)]
        if self.rank is not None and self.rank not in wanting and self.rank not in holding:
            return ()
        return senders(wanting, holding, self.host_of, order % 4093).of(self.rank)


def _local(part: Box, region: Box, offset: tuple[int, ...]) -> Box:
    """Where `part` of the canonical tensor sits in a view of a local tensor that holds `region` at `offset`."""
    return at([o + p[0] - r[0] for o, p, r in zip(offset, part, region, strict=True)], part)
