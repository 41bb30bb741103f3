"""A plan between two directories, run one destination tensor, or one chunk of one, at a time: what is in memory does not depend on the model's size."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.mapped import MappedFiles
from checkpoint.torch_dist import Chunked
from parallel.errors import UserError
from resharding.boxes import Box, at, intersect, shape_of, slices, volume, whole
from resharding.fp8 import E4M3
from resharding.layout import IDENTITY, Layout, LocalTensor
from resharding.plan import Copy, Plan
from resharding.transform import CAST

BLOCK = 1 << 20


@dataclass(frozen=True)
class Part:
    """What is made at a time: `box` of a tensor. Where it is not the whole, it holds one index of the dimensions that pieces select by."""

    local: LocalTensor
    box: Box

    @classmethod
    def whole(cls, local: LocalTensor) -> Part:
        return cls(local, whole(local.shape))

    @property
    def is_whole(self) -> bool:
        return self.box == whole(self.local.shape)

    @property
    def nbytes(self) -> int:
        return volume(self.box) * self.local.dtype.itemsize


class Assembler:
    """Makes parts of one destination layout from the files of a source. The memory of a part is used again for the next."""

    def __init__(self, plan: Plan, files: Mapping[str, Any]) -> None:
        self.files = files
        self._mapped: MappedFiles = files.mapped if hasattr(files, "mapped") else MappedFiles(Path())
        self._copies: dict[str, dict[tuple[int, ...], list[Copy]]] = defaultdict(lambda: defaultdict(list))
        self._padded = {padding.tensor for padding in plan.paddings}
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        for copy in plan.copies:
            self._copies[copy.dst_tensor][copy.dst_view.index].append(copy)

    def in_order(self, parts: Sequence[Part], source: Layout) -> list[Part]:
        """Parts in the order of the source's tensors, so that its files are read from front to back."""
        order = {local.name: i for i, local in enumerate(source.tensors)}
        return sorted(parts, key=lambda part: min((order[copy.src_tensor] for copy in self._of(part)), default=0))

    def _of(self, part: Part) -> list[Copy]:
        """The copies of the part's tensor, those with another index left out."""
        by_index = self._copies[part.local.name]
        if part.is_whole:
            return [copy for copies in by_index.values() for copy in copies]
        depth = len(next(iter(by_index)))
        return by_index.get(tuple(start for start, _ in part.box[:depth]), [])

    def _cut(self, part: Part) -> Iterator[Copy]:
        """The copies that make a part, cut to it; their destination boxes are places in the part."""
        if part.is_whole:
            yield from self._of(part)
            return
        for copy in self._of(part):
            depth = len(copy.dst_view.index)
            inner = part.box[depth:]
            if common := intersect(copy.dst_box, inner):
                cut = _shrunk(copy, _distance(common, copy.dst_box), common)
                yield cut._replace(dst_box=(*((0, 1),) * depth, *at(_distance(common, inner), common)), dst_view=IDENTITY)

    def values(self, part: Part) -> Tensor:
        """The values of a part, contiguous, valid until the next call."""
        return self._made(part, {})

    def blocks(self, part: Part, rows_only: bool = False, limit: int = BLOCK) -> Iterator[tuple[Part, Tensor]]:
        """The part in consecutive blocks of at most about `limit` bytes, which stay in the processor's caches from reading to writing.

        A block is some rows of the part, or of one index of it; with `rows_only` always whole rows of dimension 0. Its values are
        valid until the block after the next is asked for.
        """
        held: dict[str, Any] = {}
        for block in self._cut_in_blocks(part, rows_only, limit):
            yield block, self._made(block, held)

    def _cut_in_blocks(self, part: Part, rows_only: bool, limit: int) -> Iterator[Part]:
        views = {copy.dst_view for copy in self._of(part)}
        if part.nbytes <= limit or any(view.transposed or view.step > 1 for view in views):
            yield part
            return

        def row_bytes(d: int) -> int:
            return volume(part.box[d + 1:]) * part.local.dtype.itemsize

        depth = max((len(view.index) for view in views), default=0)
        cut = 0 if rows_only else depth  # the dimension that is cut; those before it are walked through one by one
        while not rows_only and cut + 1 < len(part.box) and row_bytes(cut) > limit:
            cut += 1
        step = 1 if cut < depth else max(1, limit // max(1, row_bytes(cut)))
        for index in itertools.product(*(range(*pair) for pair in part.box[:cut])):
            for start in range(part.box[cut][0], part.box[cut][1], step):
                rows = start, min(start + step, part.box[cut][1])
                yield Part(part.local, (*((i, i + 1) for i in index), rows, *part.box[cut + 1:]))

    def _made(self, part: Part, held: dict[str, Any]) -> Tensor:
        """`held` are source tensors by name, looked up once for all blocks of a part."""
        out = self._memory(part.nbytes).view(part.local.dtype).view(shape_of(part.box))
        if part.local.name in self._padded:
            out.zero_()
        with torch.no_grad(), one_thread():
            for copy in self._cut(part):
                if copy.src_tensor not in held:
                    held[copy.src_tensor] = self.files[copy.src_tensor]
                for one in _by_chunk(copy, held):
                    values, target = CAST.read(one, held), one.dst_view.of(out)[slices(one.dst_box)]
                    if not self._mapped.read(values, target):
                        target.copy_(values.reshape(target.shape))
                    if target.dtype == torch.float16 != values.dtype:
                        _check_range(one, values, target)
        return out

    def _memory(self, nbytes: int) -> Tensor:
        """One of two buffers in turn: what reads the last block may still be at it while the next is made."""
        self._buffers.reverse()
        if len(self._buffers[0]) < nbytes:
            self._buffers[0] = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffers[0] = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffers[0][:nbytes]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Copies of a block are bound by memory: a second thread of torch's brings less than its waiting costs, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_range(copy: Copy, values: Tensor, target: Tensor) -> None:
    """Raise UserError where a finite value has become infinite in float16; what was infinite or NaN stays so."""
    if target.isfinite().all():
        return
    lost = values.isfinite() & ~target.isfinite().reshape(values.shape)
    if lost.any():
        largest = values[lost].abs().max().item()
        raise UserError(f"{copy.src_tensor}, of which {copy.canonical} is made, holds values of up to {largest:g}, which float16 cannot hold (its largest is 65504); "
                        "write bfloat16 or float32 (--dtype)")


def _distance(box: Box, origin: Box) -> list[int]:
    return [a - b for (a, _), (b, _) in zip(box, origin, strict=True)]


def _shrunk(copy: Copy, steps: list[int], box: Box) -> Copy:
    """The part of a copy that begins `steps` inside its source box and region and has the shape of `box`."""
    return copy._replace(src_box=at([a + s for (a, _), s in zip(copy.src_box, steps, strict=True)], box),
                         region=at([a + s for (a, _), s in zip(copy.region, steps, strict=True)], box))


def _by_chunk(copy: Copy, files: Mapping[str, Any]) -> Iterator[Copy]:
    """The copy in parts, each of which reads one chunk of a file: a chunk is then copied from where it is mapped."""
    held = files[copy.src_tensor]
    if not isinstance(held, Chunked):
        yield copy
        return
    lead = len(copy.dst_box) - len(copy.src_box)
    for box, _ in copy.src_view.of(held).split(copy.src_box):
        steps = _distance(box, copy.src_box)
        place = at([a + s for (a, _), s in zip(copy.dst_box[lead:], steps, strict=True)], box)
        yield _shrunk(copy, steps, box)._replace(dst_box=(*copy.dst_box[:lead], *place))


def share_of(parts: Sequence[Part], rank: int, world: int) -> list[Part]:
    """The parts that `rank` makes: consecutive ones, of about an equal number of bytes on every rank."""
    total, done, mine = sum(part.nbytes for part in parts), 0, []
    for part in parts:
        if int((done + part.nbytes / 2) * world / max(total, 1)) == rank:
            mine.append(part)
        done += part.nbytes
    return mine


def stored_dtypes(layout: Layout, quantised: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every canonical tensor in files; `quantised` is what FP8 ones are read as."""
    return {p.canonical: quantised if t.dtype == E4M3 else t.dtype for t in layout.tensors for p in t.pieces if p.canonical}


def keeping_dtypes(local: LocalTensor, dtypes: Mapping[str, torch.dtype]) -> LocalTensor:
    """A destination tensor in the dtype that its ingredients have in the source: one that holds all of them exactly."""
    dtype = None
    for piece in local.pieces:
        if piece.canonical:
            found = dtypes[piece.canonical]
            dtype = found if dtype is None else torch.promote_types(dtype, found)
    return LocalTensor(local.name, local.shape, dtype or local.dtype, local.pieces)
