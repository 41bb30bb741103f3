"""Copies within one rank, and padding.

What to copy is worked out once for a plan and a geometry of its tensors, and kept as strides, not as tensors: a view would keep the
memory of an engine that sleeps. Neighbours that are contiguous on both sides become one copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from resharding.boxes import slices
from resharding.errors import WeightsError
from resharding.plan import Copy, Plan
from resharding.transform import CAST, Transform
from resharding.transport.messages import BUCKET, Pairs, fill


@dataclass(frozen=True)
class MoveReport:
    """`bytes` written into this rank's destination tensors (padding aside), by transport in `by_transport`; wall-clock `seconds`."""

    bytes: int
    seconds: float
    by_transport: Mapping[str, int] = field(default_factory=dict)


class Strided(NamedTuple):
    """A part of a tensor: `size` and `stride` in elements, `offset` from the tensor's first element."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors[self.name]
        return torch.as_strided(tensor, self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Program:
    """Copies as (destination, source) parts, and the ones that the transform computes anew each time."""

    key: object
    parts: tuple[tuple[Strided, Strided], ...]
    computed: tuple[Copy, ...]
    bytes: int


def execute(plan: Plan, source: Mapping[str, Any], destination: Mapping[str, torch.Tensor], rank: int = 0,
            group: dist.ProcessGroup | None = None, bucket_bytes: int = BUCKET, transform: Transform = CAST,
            pairs: Pairs | None = None) -> MoveReport:
    """Run the plan where nothing has to travel to or from `rank`. `pairs`: only the copies between these (source, destination) ranks.

    `source` values are tensors or anything that gives a tensor when sliced (safetensors slices); a mapping that is no dict may make
    them when asked, and is asked once for each copy. Values are cast to the destination dtype. Raises WeightsError where the plan
    needs another rank.
    """
    for copy in plan.copies if pairs != {(rank, rank)} else ():
        if rank in (copy.src_rank, copy.dst_rank) and copy.src_rank != copy.dst_rank:
            raise WeightsError(f"{copy.canonical} must travel from rank {copy.src_rank} to rank {copy.dst_rank}: "
                               "use a transport between ranks")
    return copy_own(plan, source, destination, rank, transform)


@torch.no_grad()
def copy_own(plan: Plan, source: Mapping[str, Any], destination: Mapping[str, torch.Tensor], rank: int,
             transform: Transform = CAST) -> MoveReport:
    """The part of the plan that stays on `rank`: copies from itself to itself, and its padding."""
    started = time.perf_counter()
    for padding in plan.paddings:
        if padding.rank == rank:
            padding.view.of(destination[padding.tensor])[slices(padding.box)].zero_()
    program = _program(plan, source, destination, rank, transform)
    if program.parts:
        torch._foreach_copy_([d.of(destination) for d, _ in program.parts], [s.of(source) for _, s in program.parts])
    for copy in program.computed:
        fill(copy.dst_view.of(destination[copy.dst_tensor])[slices(copy.dst_box)], copy, source, transform)
    return MoveReport(program.bytes, time.perf_counter() - started, {"in_place": program.bytes})


def _program(plan: Plan, source: Mapping[str, Any], destination: Mapping[str, torch.Tensor], rank: int, transform: Transform) -> _Program:
    copies = plan._cache.get(("own", rank))
    if copies is None:
        copies = plan._cache["own", rank] = [c for c in plan.copies if c.src_rank == rank == c.dst_rank]
    assert isinstance(copies, list)
    if not isinstance(source, dict):
        return _Program(None, (), tuple(copies), sum(c.nbytes for c in copies))
    key = (id(transform), geometry(source, (c.src_tensor for c in copies)), geometry(destination, (c.dst_tensor for c in copies)))
    program = plan._cache.get(("in_place", rank))
    if not isinstance(program, _Program) or program.key != key:
        program = plan._cache["in_place", rank] = _make(copies, source, destination, transform, key)
    return program


def geometry(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> tuple[object, ...]:
    """What a program of copies depends on: it changes where one of the tensors is laid out anew."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in map(tensors.__getitem__, dict.fromkeys(names)))


def _make(copies: Sequence[Copy], source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], transform: Transform,
          key: object) -> _Program:
    parts: list[tuple[Strided, Strided]] = []
    computed: list[Copy] = []
    for copy in copies:
        part = part_in_place(copy, source, transform)
        if part is None:
            computed.append(copy)
            continue
        target = copy.dst_view.of(destination[copy.dst_tensor])[slices(copy.dst_box)]
        flat = part.is_contiguous() and target.is_contiguous()
        new = (strided(copy.dst_tensor, target, destination[copy.dst_tensor], flat),
               strided(copy.src_tensor, part, source[copy.src_tensor], flat))
        joined = _joined(parts[-1], new) if parts else None
        if joined:
            parts[-1] = joined
        else:
            parts.append(new)
    return _Program(key, tuple(parts), tuple(computed), sum(c.nbytes for c in copies))


def part_in_place(copy: Copy, source: Mapping[str, torch.Tensor], transform: Transform) -> torch.Tensor | None:
    """What the transform reads, where that is a part of the source tensor's own memory; None where it must be computed each time."""
    tensor = source[copy.src_tensor]
    if transform is not CAST and tensor.dtype != copy.dtype:
        return None
    part = transform.read(copy, source)
    return part if part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and part.dtype == tensor.dtype else None


def strided(name: str, part: torch.Tensor, whole: torch.Tensor, flat: bool) -> Strided:
    """`part`, a view of the tensor `whole` of that name; `flat`: in one dimension."""
    size, stride = ((part.numel(),), (1,)) if flat else (tuple(part.shape), part.stride())
    return Strided(name, size, stride, part.storage_offset() - whole.storage_offset())


def _joined(one: tuple[Strided, Strided], two: tuple[Strided, Strided]) -> tuple[Strided, Strided] | None:
    """Both copies as one, where the second goes on where the first ends, on both sides."""
    out = []
    for a, b in zip(one, two, strict=True):
        if a.name != b.name or a.stride != (1,) or b.stride != (1,) or b.offset != a.offset + a.size[0]:
            return None
        out.append(Strided(a.name, (a.size[0] + b.size[0],), (1,), a.offset))
    return out[0], out[1]
