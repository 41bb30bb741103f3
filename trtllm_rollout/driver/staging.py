"""This rank's shard while an update is under way, and the full tensors that are made of all ranks' shards, bucket by bucket.

The workers' own memory cannot be shared: it lies in virtual memory that can be unmapped for sleep, of which CUDA gives no IPC handle.
So the plan writes into a shard of ours, on the same GPU, and the worker copies out of it. It is there during an update only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel.model_config import ModelConfig
from resharding.boxes import whole
from resharding.layout import Layout, LocalTensor, Piece, canonical_dtypes, canonical_shapes, empty_tensors
from resharding.plan import Plan, make_plan
from resharding.transport import execute


class Staging:
    """Tensors of one layout whose memory comes and goes; the tensors stay the same objects."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.tensors = {t.name: torch.empty(t.shape, dtype=t.dtype, device=device) for t in layout.tensors}
        self.empty()

    def fill(self) -> dict[str, torch.Tensor]:
        """Take the memory (zeros)."""
        for tensor in self.tensors.values():
            if tensor.untyped_storage().nbytes() == 0:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                tensor.zero_()
        return dict(self.tensors)

    def empty(self) -> None:
        """Give the memory back."""
        for tensor in self.tensors.values():
            tensor.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors.values())


@dataclass(frozen=True)
class Bucket:
    """`names`: the fused tensors it is made of. `layout`: the full canonical tensors, of this rank. `plan` fills them from the shards."""

    names: tuple[str, ...]
    layout: Layout
    plan: Plan


def make_buckets(model: ModelConfig, dtype: torch.dtype, layouts: Sequence[Layout], rank: int, bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes` of full tensors (or one fused tensor), which together have every canonical tensor once.

    `layouts`: of all ranks of the engine. Raises CoverageError where the shards do not make up a tensor.
    """
    shapes, dtypes = canonical_shapes(model), canonical_dtypes(model, dtype)
    makes: dict[str, dict[str, None]] = {}  # of each fused tensor, the canonical ones: experts differ from rank to rank
    for layout in layouts:
        for local in layout.tensors:
            makes.setdefault(local.name, {}).update((p.canonical, None) for p in local.pieces if p.canonical is not None)
    groups: list[list[str]] = []
    size = 0
    for name, canonical in makes.items():
        nbytes = sum(dtypes[c].itemsize * _elements(shapes[c]) for c in canonical)
        if not groups or size + nbytes > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    return [_bucket(group, {c: shapes[c] for name in group for c in makes[name]}, dtypes, layouts, rank) for group in groups]


def full_tensors(bucket: Bucket, shard: Mapping[str, torch.Tensor], rank: int, group: dist.ProcessGroup | None,
                 device: torch.device) -> dict[str, torch.Tensor]:
    """Collective over the engine's ranks: the bucket's full tensors, on every rank's own GPU (fresh memory)."""
    out = empty_tensors(bucket.layout, device)
    execute(bucket.plan, {name: shard[name] for name in bucket.names}, out, rank, group)
    return out


def all_names(buckets: Sequence[Bucket]) -> Iterator[str]:
    return (t.name for bucket in buckets for t in bucket.layout.tensors)


def _bucket(group: Sequence[str], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], layouts: Sequence[Layout],
            rank: int) -> Bucket:
    chosen = set(group)
    shards = [Layout(layout.kind, layout.rank, tuple(t for t in layout.tensors if t.name in chosen)) for layout in layouts]
    tensors = tuple(LocalTensor(name, shape, dtypes[name], (Piece(name, whole(shape), (0,) * len(shape)),)) for name, shape in shapes.items())
    full = [Layout("hf", layout.rank, tensors) for layout in layouts]
    return Bucket(tuple(group), Layout("hf", rank, tensors), make_plan(shards, full, shapes, rank=rank))


def _elements(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
