"""What a rank holds: local tensors, and which region of which canonical tensor sits where in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch

from parallel.families import FAMILIES
from parallel.families.base import Parameter
from parallel.model_config import ModelConfig
from resharding.boxes import Box, at, slices
from resharding.errors import WeightsError

__all__ = ["Box", "IDENTITY", "Layout", "Listed", "LocalTensor", "Party", "Piece", "Shard", "View", "canonical_blocks", "canonical_shapes",
           "check_tensors", "empty_tensors", "parameters_of"]


@dataclass(frozen=True)
class View:
    """How a local tensor is looked at to find a piece: `tensor[index]`, transposed, then every `step`-th row from `start` on.

    `index` selects along leading dimensions (an expert, a stacked layer). Boxes are in the coordinates of the view.
    """

    index: tuple[int, ...] = ()
    transposed: bool = False
    start: int = 0
    step: int = 1

    def of(self, tensor: Any) -> Any:
        """The view of a tensor (no copy). A safetensors slice is returned as it is where the view is the identity."""
        if self.index:
            tensor = tensor[self.index if len(self.index) > 1 else self.index[0]]
        if self.transposed:
            tensor = tensor.T
        return tensor[self.start::self.step] if self.step > 1 else tensor

    def shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the view of a tensor of shape `local`."""
        rest = local[len(self.index):]
        rest = rest[::-1] if self.transposed else rest
        return (len(range(self.start, rest[0], self.step)), *rest[1:]) if self.step > 1 else rest


IDENTITY = View()


@dataclass(frozen=True)
class Piece:
    """`region` of the canonical tensor sits at `offset` in the `view` of the local tensor.

    `canonical` None means padding: zeros of the region's shape, part of no canonical tensor.
    """

    canonical: str | None
    region: Box
    offset: tuple[int, ...]
    view: View = IDENTITY

    @property
    def place(self) -> Box:
        """Where the piece sits in its view of the local tensor."""
        return at(self.offset, self.region)

    def of(self, tensor: Any) -> Any:
        """The piece's part of a tensor (a view, no copy), in the shape of `region`."""
        return self.view.of(tensor)[slices(self.place)]


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
    """All local tensors of one rank of one party. `kind` is "hf", "mcore", "trtllm", ...; `rank` is the rank in the world."""

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


class Shard:
    """A local tensor and all ranks of a party that hold it (replicas). `make` describes it when it is first asked for."""

    def __init__(self, ranks: tuple[int, ...], make: Callable[[], LocalTensor]) -> None:
        self.ranks, self._make = ranks, make

    @cached_property
    def tensor(self) -> LocalTensor:
        return self._make()


class Party(Protocol):
    """All ranks of the trainer, of an engine, or of a directory of files, described block by block without listing every rank.

    Blocks are those of `canonical_blocks`: the embedding, each layer, the final norm, the head.
    """

    kind: str
    ranks: tuple[int, ...]

    def shards(self, block: int) -> Sequence[Shard]:
        """Every distinct local tensor that holds part of the block's canonical tensors."""
        ...

    def layout(self, rank: int) -> Layout:
        """What one rank holds."""
        ...


class Blockwise:
    """A party whose shards are made block by block, when a block is first asked for."""

    def __init__(self, kind: str, ranks: tuple[int, ...], blocks: int, make: Callable[[int], Iterable[Shard]]) -> None:
        self.kind, self.ranks, self.blocks = kind, ranks, blocks
        self._shards = lru_cache(maxsize=None)(lambda block: tuple(make(block)))

    def shards(self, block: int) -> Sequence[Shard]:
        return self._shards(block)

    def layout(self, rank: int) -> Layout:
        return Layout(self.kind, rank, tuple(shard.tensor for shard in self._by_rank[rank]))

    @cached_property
    def _by_rank(self) -> dict[int, list[Shard]]:
        """The shards of every rank, block by block."""
        out: dict[int, list[Shard]] = {rank: [] for rank in self.ranks}
        for block in range(self.blocks):
            for shard in self.shards(block):
                for rank in shard.ranks:
                    out[rank].append(shard)
        return out


class Listed:
    """A party that is given as the list of its layouts. `blocks` names the canonical tensors of each block (None: one block)."""

    def __init__(self, layouts: Sequence[Layout], blocks: Sequence[Iterable[str]] | None = None) -> None:
        self.kind = layouts[0].kind if layouts else "none"
        self.ranks = tuple(layout.rank for layout in layouts)
        self._layouts = {layout.rank: layout for layout in layouts}
        block_of = {name: i for i, names in enumerate(blocks or ()) for name in names}
        found: dict[int, dict[LocalTensor, list[int]]] = {}
        for layout in layouts:
            for tensor in layout.tensors:
                for block in {block_of.get(p.canonical, 0) for p in tensor.pieces if p.canonical is not None} or {0}:  # all padding
                    found.setdefault(block, {}).setdefault(tensor, []).append(layout.rank)
        self._shards = {block: tuple(Shard(tuple(ranks), lambda t=t: t) for t, ranks in held.items()) for block, held in found.items()}

    def shards(self, block: int) -> Sequence[Shard]:
        return self._shards.get(block, ())

    def layout(self, rank: int) -> Layout:
        return self._layouts[rank]


def parameters_of(model: ModelConfig) -> tuple[Parameter, ...]:
    """The fused parameters that the model's family declares."""
    return _parameters(model)


@lru_cache(maxsize=64)
def _parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    return FAMILIES[model.family].parameters(model)


def in_layer(parameter: Parameter, model: ModelConfig, layer: int) -> bool:
    """Whether decoder layer `layer` has the parameter."""
    return parameter.layers == "all" or (parameter.layers == "moe") == (layer in model.moe_layers)


def blocks_of(model: ModelConfig) -> list[tuple[str, int]]:
    """(stage, layer) of every block, from the embedding through the layers to the head."""
    return [("embedding", 0), *(("layer", i) for i in range(model.num_layers)), ("final", 0), ("head", 0)]


def block_parameters(model: ModelConfig, stage: str, layer: int) -> Iterator[Parameter]:
    return (p for p in parameters_of(model) if p.stage == stage and (stage != "layer" or in_layer(p, model, layer)))


def canonical_blocks(model: ModelConfig) -> list[dict[str, tuple[int, ...]]]:
    """Name and full shape of every canonical tensor, block by block. A tied model's head block is empty."""
    blocks = []
    for stage, layer in blocks_of(model):
        shapes: dict[str, tuple[int, ...]] = {}
        for p in block_parameters(model, stage, layer):
            for expert in range(model.moe.num_experts if p.expert and model.moe else 1):
                shapes.update((name.format(layer=layer, expert=expert), shape) for name, shape in p.hf)
        blocks.append(shapes)
    return blocks


def canonical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and full shape of every canonical tensor, from the embedding through the layers to the head.

    A tied model has no `lm_head.weight`.
    """
    return {name: shape for block in canonical_blocks(model) for name, shape in block.items()}


def canonical_dtypes(model: ModelConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every canonical tensor of a model in `dtype`: a few are kept in another (router correction biases in fp32)."""
    out = {}
    for stage, layer in blocks_of(model):
        for p in block_parameters(model, stage, layer):
            for expert in range(model.moe.num_experts if p.expert and model.moe else 1):
                out.update((name.format(layer=layer, expert=expert), stored_dtype(p, dtype)) for name, _ in p.hf)
    return out


def stored_dtype(parameter: Parameter, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, unless the parameter is kept in its own."""
    return getattr(torch, parameter.dtype) if parameter.dtype else dtype


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
