"""How a parameter of each kind is cut and fused: what Megatron-Core's and TensorRT-LLM's layouts share."""

from __future__ import annotations

import torch

from parallel.errors import UserError
from parallel.families.base import Kind, Parameter
from parallel.model_config import ModelConfig
from resharding.boxes import whole
from resharding.layout import LocalTensor, Piece

Shape = tuple[int, ...]
Run = tuple[str | None, int, int]  # rows [start, stop) of a canonical tensor; None: padding rows
Ingredients = tuple[tuple[str, Shape], ...]


def ingredients_of(parameter: Parameter, layer: int, expert: int = 0) -> Ingredients:
    """Canonical names and full shapes of one parameter of one layer (and expert)."""
    return tuple((name.format(layer=layer, expert=expert), shape) for name, shape in parameter.hf)


def share(size: int, tp: int, what: str) -> int:
    """`size / tp`. Raises UserError where it is not whole."""
    if size % tp:
        fits = [n for n in range(1, size + 1) if size % n == 0]
        raise UserError(f"tp={tp} does not divide {what} {size} of the model; tp may be {', '.join(map(str, fits[:12]))}")
    return size // tp


def cut(name: str, kind: Kind, ingredients: Ingredients, tp: int, tp_rank: int, dtype: torch.dtype, up_first: bool = False) -> LocalTensor:
    """The kinds that Megatron-Core and the engine cut alike: replicated, column, row, gate_up.

    `up_first` puts the second ingredient of gate_up above the first, as the engine does for experts.
    """
    canonical, shape = ingredients[0]
    if kind == "replicated":
        return stacked(name, [(canonical, 0, shape[0])], shape[1:], dtype)
    if kind == "row":
        columns = share(shape[1], tp, f"the columns of {canonical}:")
        region = ((0, shape[0]), (tp_rank * columns, (tp_rank + 1) * columns))
        return LocalTensor(name, (shape[0], columns), dtype, (Piece(canonical, region, (0, 0)),))
    rows = [share(s[0], tp, f"the rows of {n}:") for n, s in ingredients]  # column, and gate rows above up rows
    runs: list[Run] = [(n, tp_rank * k, (tp_rank + 1) * k) for (n, _), k in zip(ingredients, rows)]
    return stacked(name, runs[::-1] if up_first else runs, shape[1:], dtype)


def vocabulary(name: str, ingredients: Ingredients, rows: int, tp_rank: int, dtype: torch.dtype) -> LocalTensor:
    """Rows [tp_rank * rows, (tp_rank + 1) * rows) of the vocabulary; those past its end are padding."""
    canonical, shape = ingredients[0]
    start, stop = min(tp_rank * rows, shape[0]), min((tp_rank + 1) * rows, shape[0])
    return stacked(name, [(canonical, start, stop), (None, 0, rows - (stop - start))], shape[1:], dtype)


def query_groups(ingredients: Ingredients, model: ModelConfig) -> list[Run]:
    """Rows of Megatron's whole linear_qkv: for each group its query heads, its key head, its value head."""
    (q, _), (k, _), (v, _) = ingredients
    per_group, d = model.num_heads // model.num_kv_heads * model.head_dim, model.head_dim
    runs: list[Run] = []
    for g in range(model.num_kv_heads):
        runs += [(q, g * per_group, (g + 1) * per_group), (k, g * d, (g + 1) * d), (v, g * d, (g + 1) * d)]
    return runs


def window(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Rows [start, stop) of stacked runs (a cut may fall inside a head where tp exceeds the key/value heads)."""
    out: list[Run] = []
    position = 0
    for canonical, low, high in runs:
        a, b = max(start - position, 0), min(stop - position, high - low)
        if a < b:
            out.append((canonical, low + a, low + b))
        position += high - low
    return out


def stacked(name: str, runs: list[Run], trailing: Shape, dtype: torch.dtype) -> LocalTensor:
    """A local tensor that is made of whole rows, run below run."""
    pieces, position = [], 0
    for canonical, start, stop in runs:
        if start < stop:
            pieces.append(Piece(canonical, ((start, stop), *whole(trailing)), (position, *(0,) * len(trailing))))
            position += stop - start
    return LocalTensor(name, (position, *trailing), dtype, tuple(pieces))
