"""FP8 layouts, derived from any other: chosen matrices become e4m3 codes, each with a tensor of its block scales beside it.

Canonical tensors are extended by `<canonical>_scale_inv`, [ceil(rows / 128), ceil(columns / 128)] in float32, so that plans, transports
and checksums treat scales as they treat any tensor. `fp8_party` is for a side that stores FP8 (an engine, or a trainer with FP8
primary weights); `scaled_party` is for a trainer in bf16 or fp32 whose weights are quantised on the way (`resharding.transform`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.boxes import Box, first_overlap, shape_of, whole
from resharding.fp8 import BLOCK, E4M3, SUFFIX, Block, grid_shape, touched
from resharding.layout import Blockwise, Layout, LocalTensor, Party, Piece, Shard, block_parameters, blocks_of

Shapes = Mapping[str, tuple[int, ...]]
_MATRICES = ("column", "row", "qkv", "gate_up")


def fp8_weights(model: ModelConfig, keep: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Name and full shape of every canonical tensor that FP8 stores as codes: the matrices of attention, MLPs and experts.

    Embeddings, head, norms, routers, gates, biases and sinks stay as they are, and so do the modules `keep` (names as in
    `modules_to_not_convert` of a quantization_config: a module or one it is part of).
    """
    out: dict[str, tuple[int, ...]] = {}
    for stage, layer in blocks_of(model):
        for p in block_parameters(model, stage, layer):
            for expert in range(model.moe.num_experts if p.expert and model.moe else 1):
                if p.kind in _MATRICES:
                    out.update((name.format(layer=layer, expert=expert), shape) for name, shape in p.hf if len(shape) == 2)
    return {name: shape for name, shape in out.items() if not any(name == k or name.startswith(k + ".") for k in keep)}


def fp8_blocks(blocks: Sequence[Shapes], weights: Shapes, block: Block = BLOCK) -> list[dict[str, tuple[int, ...]]]:
    """`canonical_blocks` with the scales of `weights`."""
    out = []
    for shapes in blocks:
        scales = {name + SUFFIX: grid_shape(shape, block) for name, shape in shapes.items() if name in weights}
        out.append({**shapes, **scales})
    return out


def fp8_party(party: Party, weights: Shapes, blocks: int, block: Block = BLOCK) -> Blockwise:
    """What `party` holds where its tensors of `weights` are FP8: codes under their names, scales under `<name>_scale_inv`.

    `blocks` is the number of canonical blocks. Raises UserError, when the party is asked, where a shard or a fused piece does not
    begin and end on the blocks of scales of its canonical tensor, and where a fused tensor is chosen in part.
    """
    def derive(number: int) -> Iterable[Shard]:
        for shard in party.shards(number):
            for tensor in _stored(shard.tensor, weights, block, party.kind):
                yield Shard(shard.ranks, partial(_same, tensor))

    return Blockwise(party.kind, party.ranks, blocks, derive)


def fp8_layout(layout: Layout, weights: Shapes, block: Block = BLOCK) -> Layout:
    """What one rank holds: see `fp8_party`."""
    return replace(layout, tensors=tuple(t for tensor in layout.tensors for t in _stored(tensor, weights, block, layout.kind)))


def _same(tensor: LocalTensor) -> LocalTensor:
    return tensor


def _stored(tensor: LocalTensor, weights: Shapes, block: Block, kind: str) -> list[LocalTensor]:
    chosen = [piece.canonical in weights for piece in tensor.pieces]
    if not any(chosen):
        return [tensor]
    if not all(chosen):
        one, other = tensor.pieces[chosen.index(True)].canonical, tensor.pieces[chosen.index(False)].canonical
        raise UserError(f"{kind} tensor {tensor.name} cannot be FP8: it holds {one}, which is to be FP8, and {other or 'padding'}, which "
                        "is not; choose all of a fused tensor's parts or none")
    pieces = tuple(_scales_of(piece, tensor, weights[piece.canonical or ""], block, kind) for piece in tensor.pieces)
    return [replace(tensor, dtype=E4M3), LocalTensor(tensor.name + SUFFIX, grid_shape(tensor.shape, block), torch.float32, pieces)]


def _scales_of(piece: Piece, tensor: LocalTensor, shape: tuple[int, ...], block: Block, kind: str) -> Piece:
    """Where the scales of a piece sit in the tensor of scales. Raises UserError where its blocks are cut."""
    if piece.view.transposed or piece.view.step > 1:
        raise UserError(f"{kind} tensor {tensor.name} cannot be FP8 in blocks: it holds {piece.canonical} transposed or row by row among "
                        "others")
    for word, size, full, (start, stop), offset in zip(("rows", "columns"), block, shape, piece.region, piece.offset, strict=True):
        if start % size or (stop % size and stop != full) or offset % size:
            fits = [n for n in range(1, full // size + 1) if full % (n * size) == 0] or [1]
            raise UserError(
                f"{kind} tensor {tensor.name} cannot be FP8: its {word} [{start}, {stop}) of {piece.canonical} {list(shape)}, kept from "
                f"{word[:-1]} {offset} on, do not lie on blocks of {size}. The {full} {word} can be cut into equal parts of whole blocks "
                f"by tp = {', '.join(map(str, fits))}: choose one of these, or leave the tensor out of FP8")
    region = touched(piece.region, block)
    return Piece(f"{piece.canonical}{SUFFIX}", region, tuple(o // size for o, size in zip(piece.offset, block)), piece.view)


class ScaledParty(Blockwise):
    """See `scaled_party`."""

    def __init__(self, inner: Party, weights: Shapes, blocks: int, block: Block) -> None:
        super().__init__(inner.kind, inner.ranks, blocks, self._derive)
        self._inner, self.weights, self.block = inner, weights, block
        self._made: dict[str, bool] = {}

    @cached_property
    def made(self) -> Mapping[str, bool]:
        """The scales (by canonical name) that the source makes, and whether shards cut blocks of theirs; the same on every rank."""
        for number in range(self.blocks):
            self.shards(number)
        return {name + SUFFIX: self._made[name] for name in self.weights if name in self._made}

    @cached_property
    def exchanged(self) -> Mapping[str, tuple[int, ...]]:
        """Grid shapes of the scales of which no rank need know all maxima by itself."""
        return {name: grid_shape(self.weights[name.removesuffix(SUFFIX)], self.block) for name, cut in self.made.items() if cut}

    def _derive(self, number: int) -> Iterable[Shard]:
        shards = self._inner.shards(number)
        held: dict[str, dict[Box, list[int]]] = {}
        for shard in shards:
            for piece in shard.tensor.pieces if shard.tensor.dtype != E4M3 else ():
                if piece.canonical in self.weights:
                    held.setdefault(piece.canonical, {}).setdefault(piece.region, []).extend(shard.ranks)
        yield from shards
        for canonical, regions in held.items():
            grid = whole(grid_shape(self.weights[canonical], self.block))
            boxes = {touched(region, self.block): ranks for region, ranks in regions.items()}
            cut = len(boxes) < len(regions) or first_overlap(tuple(boxes)) is not None
            self._made[canonical] = cut
            if cut:
                boxes = {grid: [rank for ranks in regions.values() for rank in ranks]}
            for box, ranks in boxes.items():
                yield Shard(tuple(dict.fromkeys(ranks)), partial(_scale_tensor, canonical, box, box == grid))


def scaled_party(party: Party, weights: Shapes, blocks: int, block: Block = BLOCK) -> ScaledParty:
    """What `party`, which holds `weights` in a wider dtype, can send as FP8: its tensors and the scales of their blocks.

    A rank has the scales of the blocks that it holds. Where a shard cuts a block, every rank that holds any part of the canonical
    tensor has all of its scales: they exchange block maxima first. Weights that the party holds as FP8 pass through as they are.
    """
    return ScaledParty(party, weights, blocks, block)


def _scale_tensor(canonical: str, box: Box, whole_grid: bool) -> LocalTensor:
    part = "" if whole_grid else "[" + ",".join(f"{start}:{stop}" for start, stop in box) + "]"
    return LocalTensor(canonical + SUFFIX + part, shape_of(box), torch.float32, (Piece(canonical + SUFFIX, box, (0,) * len(box)),))
