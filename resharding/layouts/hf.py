"""The `hf` layout: every canonical tensor whole, or all experts of a layer in one tensor."""

from __future__ import annotations

from typing import Literal

import torch

from parallel.families import FAMILIES
from parallel.families.base import Parameter
from parallel.model_config import ModelConfig
from resharding.boxes import whole
from resharding.layout import Layout, LocalTensor, Piece, View, block_parameters, blocks_of, stored_dtype
from resharding.layouts.cut import ingredients_of

ExpertFiles = Literal["split", "fused", "transposed"]


def hf_layout(model: ModelConfig, dtype: torch.dtype, rank: int = 0, experts: ExpertFiles | None = None) -> Layout:
    """What a Hugging Face directory holds.

    `experts`: "split" is one tensor per expert and matrix under its canonical name; "fused" what transformers 5 keeps in memory
    and some directories hold ([experts, gate rows above up rows, in] and [experts, out, in]); "transposed" is gpt_oss's
    ([experts, in, gate and up columns interleaved] and [experts, in, out]). None: as the family's directories have it.
    """
    experts = experts or FAMILIES[model.family].fused_experts
    tensors: list[LocalTensor] = []
    for stage, layer in blocks_of(model):
        for p in block_parameters(model, stage, layer):
            if p.expert and experts != "split":
                tensors.append(_fused(p, model, layer, dtype, experts == "transposed"))
                continue
            for expert in range(model.moe.num_experts if p.expert and model.moe else 1):
                for name, shape in ingredients_of(p, layer, expert):
                    tensors.append(LocalTensor(name, shape, stored_dtype(p, dtype), (Piece(name, whole(shape), (0,) * len(shape)),)))
    return Layout("hf", rank, tuple(tensors))


def _fused(parameter: Parameter, model: ModelConfig, layer: int, dtype: torch.dtype, transposed: bool) -> LocalTensor:
    """All experts of a layer in one tensor."""
    assert model.moe is not None and parameter.fused is not None
    pieces: list[Piece] = []
    count = len(parameter.hf)
    for expert in range(model.moe.num_experts):
        for i, (name, shape) in enumerate(ingredients_of(parameter, layer, expert)):
            origin = (0,) * len(shape)
            if transposed:
                view = View((expert,), len(shape) == 2, i, count)
                pieces.append(Piece(name, whole(shape), origin, view))
            else:
                pieces.append(Piece(name, whole(shape), (i * shape[0], *origin[1:]), View((expert,))))
    rows, *columns = parameter.hf[0][1]
    local = (count * rows, *columns)
    return LocalTensor(parameter.fused.format(layer=layer), (model.moe.num_experts, *(local[::-1] if transposed else local)), dtype, tuple(pieces))
