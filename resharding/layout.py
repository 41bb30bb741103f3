"""What a rank holds: local tensors, and which region of which canonical tensor sits where in each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from parallel.families import FAMILIES
from parallel.families.base import Parameter
from parallel.model_config import ModelConfig
from resharding.boxes import Box, at
from resharding.errors import WeightsError

__all__ = ["Box", "Layout", "LocalTensor", "Piece", "canonical_shapes", "check_tensors", "empty_tensors", "parameters_of"]


@dataclass(frozen=True)
class Piece:
    """`region` of the canonical tensor sits at `offset` in the local tensor.

    `canonical` None means padding: zeros of the region's shape, part of no canonical tensor.
    """

    canonical: str | None
    region: Box
    offset: tuple[int, ...]

    @property
    def place(self) -> Box:
        """Where the piece sits in the local tensor."""
        return at(self.offset, self.region)


@dataclass(frozen=True)
class LocalTensor:
    """One tensor of one rank. The pieces tile it: no gap, no overlap (checked when a plan is made)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All local tensors of one rank of one party. `kind` is "hf", "mcore" or "trtllm"; `rank` is the rank in the world."""

    kind: str
    rank: int
    tensors: tuple[LocalTensor, ...]

    @cached_property
    def by_name(self) -> dict[str, LocalTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def __getitem__(self, name: str) -> LocalTensor:
        return self.by_name[name]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def parameters_of(model: ModelConfig) -> tuple[Parameter, ...]:
    """The fused parameters that the model's family declares."""
    return FAMILIES[model.family].parameters(model)


def canonical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and full shape of every canonical tensor, from the embedding through the layers to the head.

    A tied model has no `lm_head.weight`.
    """
    parameters = parameters_of(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in ("embedding", "layer", "final", "head"):
        for layer in range(model.num_layers if stage == "layer" else 1):
            for parameter in parameters:
                if parameter.stage == stage:
                    shapes.update((name.format(layer=layer), shape) for name, shape in parameter.hf)
    return shapes


def check_tensors(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsError where `tensors` lacks a tensor of the layout or holds it with another shape or dtype."""
    for local in layout.tensors:
        if local.name not in tensors:
            raise WeightsError(f"rank {layout.rank}: the {layout.kind} tensors lack {local.name}")
        tensor = tensors[local.name]
        if tuple(tensor.shape) != local.shape or tensor.dtype != local.dtype:
            raise WeightsError(f"rank {layout.rank}: {layout.kind} tensor {local.name} is {tuple(tensor.shape)} {tensor.dtype}, "
                               f"its layout says {local.shape} {local.dtype}")


def empty_tensors(layout: Layout, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Uninitialised tensors for every local tensor of the layout."""
    return {local.name: torch.empty(local.shape, dtype=local.dtype, device=device) for local in layout.tensors}
