"""What happens to values on the way from a source tensor to a destination tensor: the one seam that every transport reads through."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from resharding.boxes import Box, at, inside, slices
from resharding.errors import WeightsError, listed
from resharding.fp8 import E4M3, SUFFIX, quantise_region, region_amax, scale_of, touched
from resharding.layout import LocalTensor, Piece
from resharding.layouts.fp8 import ScaledParty
from resharding.plan import Copy


class Transform(Protocol):
    """Applied at the source, so that what travels is already in the destination's dtype."""

    def prepare(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        """Collective, before a move: the tensors that the move reads from, given the source's."""
        ...

    def read(self, copy: Copy, source: Mapping[str, Any]) -> torch.Tensor:
        """The values of `copy`, in the shape of its boxes. A transport casts them to `copy.dtype` as it packs or writes them."""
        ...


class Cast:
    """The values as they are. The cast to the destination dtype is the transport's `copy_`."""

    def prepare(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        return source

    def read(self, copy: Copy, source: Mapping[str, Any]) -> torch.Tensor:
        """A view of the source tensor. Raises WeightsError for a cast to or from FP8: codes without their scales are not the weights."""
        part: torch.Tensor = copy.src_view.of(source[copy.src_tensor])[slices(copy.src_box)]
        if part.dtype != copy.dtype and E4M3 in (part.dtype, copy.dtype):
            raise WeightsError(f"{copy.canonical}: {copy.src_tensor} is {part.dtype} and must arrive as {copy.dtype}, which takes block "
                               "scales; a plain cast would lose them")
        return part


CAST = Cast()


class Fp8Source:
    """Quantises at the source, to the bits that quantising each assembled canonical tensor gives. One object serves many moves.

    Weights that are FP8 already are read as they are, codes and scales.
    """

    def __init__(self, party: ScaledParty, rank: int, group: dist.ProcessGroup | None = None) -> None:
        """`group` holds all ranks of the party; all its ranks take part in `prepare`, also those outside the party."""
        self._block, self._group, self._exchanged = party.block, group, party.exchanged
        self._scales: list[tuple[LocalTensor, Piece]] = []
        self._pieces: list[tuple[LocalTensor, Piece]] = []
        for local in party.layout(rank).tensors if rank in party.ranks else ():
            if local.pieces and local.pieces[0].canonical in party.made:
                self._scales.append((local, local.pieces[0]))
            elif local.dtype != E4M3:
                self._pieces += [(local, piece) for piece in local.pieces if piece.canonical in party.weights]
        self._flat = torch.empty(0)  # all scales of this rank, one after the other
        self._tensors: dict[str, torch.Tensor] = {}
        self._grids: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        self._infinite: list[str] = []

    def prepare(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        """Collective: `source` and the scales of its weights. Where shards cut blocks, one all-reduce of 4 bytes for each such block.

        Raises WeightsError, after the exchange, where a weight holds values that are not finite.
        """
        maxima = self.maxima(source)
        if maxima is not None and dist.is_initialized() and dist.get_world_size(self._group) > 1:
            on = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(self._group) else torch.device("cpu")
            everywhere = maxima.to(on)
            dist.all_reduce(everywhere, dist.ReduceOp.MAX, self._group)
            maxima = everywhere.to(maxima.device)
        return {**source, **self.scales(maxima)}

    def maxima(self, source: Mapping[str, Any]) -> torch.Tensor | None:
        """The block maxima of this rank's pieces, as far as other ranks need them, in an order that all share (None: no block is cut)."""
        self._allocate(next((source[local.name].device for local, _ in self._pieces), torch.device("cpu")))
        self._flat.zero_()
        for local, piece in self._pieces:
            grid = self._grid(piece.canonical or "", piece.region)
            torch.maximum(grid, region_amax(piece.of(source[local.name].detach()), piece.region, self._block), out=grid)
        self._infinite = []
        if not self._flat.isfinite().all():
            self._infinite = [name for name, grids in self._grids.items() if not all(grid.isfinite().all() for _, grid in grids)]
            self._flat.zero_()  # nothing that a maximum over ranks treats in a way of its own
        if not self._exchanged:
            return None
        return torch.cat([self._tensors[name].flatten() if name in self._tensors else self._flat.new_zeros(math.prod(shape))
                          for name, shape in self._exchanged.items()])

    def scales(self, maxima: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        """The scales of this rank's weights, given the maxima over all ranks of `maxima`."""
        if self._infinite:
            raise WeightsError(f"{listed(self._infinite)}: there are values that are not finite; they cannot be quantised to FP8")
        for (name, shape), part in zip(self._exchanged.items(), _split(maxima, self._exchanged.values()), strict=True):
            if name in self._tensors:
                self._tensors[name].copy_(part.view(shape))
        self._flat.copy_(scale_of(self._flat))
        return self._tensors

    def read(self, copy: Copy, source: Mapping[str, Any]) -> torch.Tensor:
        """The codes of a weight that is not FP8 yet, anything else as it is. `source` is what `prepare` gave."""
        tensor = source[copy.src_tensor]
        if copy.dtype != E4M3 or tensor.dtype == E4M3:
            return CAST.read(copy, source)
        part = copy.src_view.of(tensor.detach())[slices(copy.src_box)]
        return quantise_region(part, self._grid(copy.canonical, copy.region), copy.region, self._block)

    def _grid(self, canonical: str, region: Box) -> torch.Tensor:
        """This rank's scales of the blocks that a region touches. Raises WeightsError where it has none."""
        blocks = touched(region, self._block)
        for box, grid in self._grids.get(canonical, ()):
            if inside(blocks, box):
                return grid[slices(at([b[0] - o[0] for b, o in zip(blocks, box)], blocks))]
        raise WeightsError(f"{canonical} is to arrive as FP8, but it is not among the weights that are quantised at the source")

    def _allocate(self, device: torch.device) -> None:
        if self._tensors and self._flat.device == device:
            return
        sizes = [math.prod(local.shape) for local, _ in self._scales]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._tensors, self._grids = {}, {}
        for (local, piece), part in zip(self._scales, self._flat.split(sizes), strict=True):
            self._tensors[local.name] = part.view(local.shape)
            self._grids.setdefault((piece.canonical or "").removesuffix(SUFFIX), []).append((piece.region, self._tensors[local.name]))


def _split(maxima: torch.Tensor | None, shapes: Iterable[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    return () if maxima is None else maxima.split([math.prod(shape) for shape in shapes])
