"""The layout of every party: HF files, Megatron-Core ranks, TensorRT-LLM ranks.

Families say how a parameter is cut and fused (`Parameter.kind`); this file alone knows what each kind means in each layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import torch

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.families.base import Parameter
from parallel.model_config import ModelConfig
from resharding.boxes import whole
from resharding.layout import Layout, LocalTensor, Piece, canonical_shapes, parameters_of

Shape = tuple[int, ...]
Run = tuple[str | None, int, int]  # rows [start, stop) of a canonical tensor; None: padding rows
Ingredient = tuple[str, Shape]


def hf_layout(model: ModelConfig, dtype: torch.dtype, rank: int = 0) -> Layout:
    """Every canonical tensor whole, under its own name: what a Hugging Face directory holds."""
    tensors = (LocalTensor(name, shape, dtype, (Piece(name, whole(shape), (0,) * len(shape)),))
               for name, shape in canonical_shapes(model).items())
    return Layout("hf", rank, tuple(tensors))


def mcore_layout(model: ModelConfig, parallel: ParallelConfig, rank: int, world_size: int, dtype: torch.dtype,
                 names: Literal["local", "te"] = "local", head: bool = True) -> Layout:
    """What Megatron-Core's GPTModel holds on `rank` of a world of `world_size` (data- and context-parallel ranks are replicas).

    Names are GPTModel parameter names, `chunk{c}.` before them where the stage has several virtual pipeline chunks; layer
    indices are local to the chunk. The last of several stages holds `output_layer.weight` also when the head is tied; with
    one stage a tied model has none. `head=False` leaves the output layer out (a critic has a value head in its place).
    Raises UserError where a size does not divide by tp.
    """
    here = parallel.coordinates(rank, world_size)
    return Layout("mcore", rank, _mcore_tensors(model, parallel, here.pp, here.tp, dtype, names, head))


def trtllm_layout(model: ModelConfig, tp: int, tp_rank: int, rank: int, dtype: torch.dtype, tied_head: bool = False) -> Layout:
    """What TensorRT-LLM's PyTorch backend (and the embedded engine) holds on rank `tp_rank` of `tp`; `rank` is the world rank.

    Fused tensors are fused per rank: `qkv_proj` = [q; k; v] and `gate_up_proj` = [gate; up], each ingredient cut on dim 0
    before; a key/value head is repeated tp / num_kv_heads times where tp exceeds the heads. Vocabulary rows are cut to
    ceil(V / tp) and the tail is padding. A tied model has no `lm_head.weight` unless `tied_head` asks for a copy of its own.
    Raises UserError where a size does not divide by tp.
    """
    return Layout("trtllm", rank, _trtllm_tensors(model, tp, tp_rank, dtype, tied_head))


@lru_cache(maxsize=512)  # replicas share their description
def _mcore_tensors(model: ModelConfig, parallel: ParallelConfig, pp_rank: int, tp_rank: int, dtype: torch.dtype, names: str,
                   head: bool) -> tuple[LocalTensor, ...]:
    tensors: list[LocalTensor] = []
    for chunk in range(parallel.chunks):
        prefix = f"chunk{chunk}." if parallel.chunks > 1 else ""
        first = pp_rank == 0 and chunk == 0
        last = pp_rank == parallel.pp - 1 and chunk == parallel.chunks - 1
        for name, parameter, ingredients in _mcore_parameters(model, parallel.layers(model, pp_rank, chunk), first, last, names, head):
            tensors.append(_mcore_tensor(prefix + name, parameter, ingredients, model, parallel.tp, tp_rank, dtype))
    return tuple(tensors)


@lru_cache(maxsize=512)
def _trtllm_tensors(model: ModelConfig, tp: int, tp_rank: int, dtype: torch.dtype, tied_head: bool) -> tuple[LocalTensor, ...]:
    tensors: list[LocalTensor] = []
    for layer, parameter in _in_order(model):
        ingredients = _named(parameter, layer)
        tensors.append(_trtllm_tensor(parameter.trtllm.format(layer=layer), parameter, ingredients, model, tp, tp_rank, dtype))
        if parameter.stage == "embedding" and model.tied and tied_head:
            tensors.append(_trtllm_tensor("lm_head.weight", parameter, ingredients, model, tp, tp_rank, dtype))
    return tuple(tensors)


def _in_order(model: ModelConfig) -> Iterator[tuple[int, Parameter]]:
    """(layer, parameter) from the embedding through the layers to the head."""
    parameters = parameters_of(model)
    for stage in ("embedding", "layer", "final", "head"):
        for layer in range(model.num_layers if stage == "layer" else 1):
            yield from ((layer, p) for p in parameters if p.stage == stage)


def _named(parameter: Parameter, layer: int) -> tuple[Ingredient, ...]:
    return tuple((name.format(layer=layer), shape) for name, shape in parameter.hf)


def _mcore_parameters(model: ModelConfig, layers: range, first: bool, last: bool, names: str,
                      head: bool) -> Iterator[tuple[str, Parameter, tuple[Ingredient, ...]]]:
    """(Megatron name, parameter, canonical ingredients) of one chunk that holds the global `layers`."""
    by_stage = {stage: [p for p in parameters_of(model) if p.stage == stage] for stage in ("embedding", "layer", "final", "head")}
    wanted = [(p, 0, 0) for p in by_stage["embedding"] if first]
    wanted += [(p, local, layer) for local, layer in enumerate(layers) for p in by_stage["layer"]]
    wanted += [(p, 0, 0) for stage in ("final", "head") for p in by_stage[stage] if last and (head or stage == "final")]
    for parameter, local, layer in wanted:
        template = parameter.mcore_te if names == "te" and parameter.mcore_te else parameter.mcore
        yield template.format(layer=local), parameter, _named(parameter, layer)
    if model.tied and last and not first and head:
        embedding = by_stage["embedding"][0]
        yield "output_layer.weight", embedding, _named(embedding, 0)


def _share(size: int, tp: int, what: str) -> int:
    """`size / tp`. Raises UserError where it is not whole."""
    if size % tp:
        fits = [n for n in range(1, size + 1) if size % n == 0]
        raise UserError(f"tp={tp} does not divide {what} {size} of the model; tp may be {', '.join(map(str, fits[:12]))}")
    return size // tp


def _mcore_tensor(name: str, parameter: Parameter, ingredients: tuple[Ingredient, ...], model: ModelConfig, tp: int, tp_rank: int,
                  dtype: torch.dtype) -> LocalTensor:
    if parameter.kind == "qkv":
        rows = _share(model.q_size + 2 * model.kv_size, tp, "rows of the fused query, key and value projection")
        runs = _window(_query_groups(ingredients, model), tp_rank * rows, (tp_rank + 1) * rows)
        return _stacked(name, runs, ingredients[0][1][1:], dtype)
    if parameter.kind == "vocabulary":
        return _vocabulary(name, ingredients[0], model.padded_vocab_size(tp) // tp, tp_rank, dtype)
    return _cut(name, parameter, ingredients, tp, tp_rank, dtype)


def _trtllm_tensor(name: str, parameter: Parameter, ingredients: tuple[Ingredient, ...], model: ModelConfig, tp: int, tp_rank: int,
                   dtype: torch.dtype) -> LocalTensor:
    if parameter.kind == "qkv":
        q = _share(model.num_heads, tp, "num_attention_heads") * model.head_dim
        if tp <= model.num_kv_heads:
            first, heads = tp_rank * _share(model.num_kv_heads, tp, "num_key_value_heads"), model.num_kv_heads // tp
        else:
            if tp % model.num_kv_heads:
                raise UserError(f"engine tp={tp} is not a multiple of num_key_value_heads {model.num_kv_heads}; "
                                "choose a multiple or a divisor of it")
            first, heads = tp_rank * model.num_kv_heads // tp, 1
        kv = (first * model.head_dim, (first + heads) * model.head_dim)
        (q_name, q_shape), (k_name, _), (v_name, _) = ingredients
        runs: list[Run] = [(q_name, tp_rank * q, (tp_rank + 1) * q), (k_name, *kv), (v_name, *kv)]
        return _stacked(name, runs, q_shape[1:], dtype)
    if parameter.kind == "vocabulary":
        return _vocabulary(name, ingredients[0], -(-model.vocab_size // tp), tp_rank, dtype)
    return _cut(name, parameter, ingredients, tp, tp_rank, dtype)


def _cut(name: str, parameter: Parameter, ingredients: tuple[Ingredient, ...], tp: int, tp_rank: int, dtype: torch.dtype) -> LocalTensor:
    """The kinds that Megatron-Core and the engine cut alike: replicated, column, row, gate_up."""
    canonical, shape = ingredients[0]
    if parameter.kind == "replicated":
        return _stacked(name, [(canonical, 0, shape[0])], shape[1:], dtype)
    if parameter.kind == "row":
        columns = _share(shape[1], tp, f"the columns of {canonical}:")
        region = ((0, shape[0]), (tp_rank * columns, (tp_rank + 1) * columns))
        return LocalTensor(name, (shape[0], columns), dtype, (Piece(canonical, region, (0, 0)),))
    rows = [_share(s[0], tp, f"the rows of {n}:") for n, s in ingredients]  # column, and gate rows above up rows
    runs: list[Run] = [(n, tp_rank * k, (tp_rank + 1) * k) for (n, _), k in zip(ingredients, rows)]
    return _stacked(name, runs, shape[1:], dtype)


def _vocabulary(name: str, ingredient: Ingredient, rows: int, tp_rank: int, dtype: torch.dtype) -> LocalTensor:
    """Rows [tp_rank * rows, (tp_rank + 1) * rows) of the vocabulary; those past its end are padding."""
    canonical, shape = ingredient
    start, stop = min(tp_rank * rows, shape[0]), min((tp_rank + 1) * rows, shape[0])
    return _stacked(name, [(canonical, start, stop), (None, 0, rows - (stop - start))], shape[1:], dtype)


def _query_groups(ingredients: tuple[Ingredient, ...], model: ModelConfig) -> list[Run]:
    """Rows of Megatron's whole linear_qkv: for each group its query heads, its key head, its value head."""
    (q, _), (k, _), (v, _) = ingredients
    per_group, d = model.num_heads // model.num_kv_heads * model.head_dim, model.head_dim
    runs: list[Run] = []
    for g in range(model.num_kv_heads):
        runs += [(q, g * per_group, (g + 1) * per_group), (k, g * d, (g + 1) * d), (v, g * d, (g + 1) * d)]
    return runs


def _window(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Rows [start, stop) of stacked runs (a cut may fall inside a head where tp exceeds the key/value heads)."""
    out: list[Run] = []
    position = 0
    for canonical, low, high in runs:
        a, b = max(start - position, 0), min(stop - position, high - low)
        if a < b:
            out.append((canonical, low + a, low + b))
        position += high - low
    return out


def _stacked(name: str, runs: list[Run], trailing: Shape, dtype: torch.dtype) -> LocalTensor:
    """A local tensor that is made of whole rows, run below run."""
    pieces, position = [], 0
    for canonical, start, stop in runs:
        if start < stop:
            pieces.append(Piece(canonical, ((start, stop), *whole(trailing)), (position, *(0,) * len(trailing))))
            position += stop - start
    return LocalTensor(name, (position, *trailing), dtype, tuple(pieces))
