"""What Transformer Engine stores for a weight that is FP8 itself (Megatron's `fp8_param`), by recipe, and how to take it apart.

Read from Transformer Engine 2.8 and 2.20.0.dev0 (`pytorch/tensor/*.py`: the quantizers' `inner_tensor_specs` and `get_scale_shape`;
`pytorch/module/base.py`: `get_extra_state`) and from Megatron-Core 0.16 (`fp8_utils.py`, `extensions/transformer_engine.py`). Tested
with stand-ins that have these attributes; it has **not been run on a GPU or with Transformer Engine itself**.

A parameter keeps its name and shape [rows, columns] and claims to be bf16; the bytes are in attributes, codes always as uint8:

- `delayed`, `tensorwise` (Float8Tensor): `_data` [rows, columns], `_scale_inv` [1] in float32 for the whole shard, and before Blackwell
  `_transpose` [columns, rows], the same codes transposed.
- `blockwise` (Float8BlockwiseQTensor, weights in blocks of 128 x 128): `_rowwise_data` [rows, columns] with `_rowwise_scale_inv`
  [rows / 128, columns / 128], columns padded to a multiple of 4; `_columnwise_data` [columns, rows] with `_columnwise_scale_inv`
  [columns / 128, rows / 128], padded likewise. Scales are powers of 2 unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1. Shards must be
  multiples of 128 in both dimensions. (Blocks of 1 x 128, which activations have, hold their scales transposed.)
- `mxfp8` (MXFP8Tensor): `_rowwise_data` [rows, columns] with `_rowwise_scale_inv` [rows up to 128s, columns / 32 up to 4s] in uint8,
  the exponents of powers of 2 plus 127; `_columnwise_data` [rows, columns], quantised apart from it, with `_columnwise_scale_inv`
  [rows / 32 up to 4s, columns up to 128s].

Every TE module also has a state-dict entry `<module>._extra_state`, a pickle in a uint8 tensor: see `extra_state`. It is no weight and
has no canonical tensor; a sync leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from parallel.errors import UserError
from resharding.fp8 import BLOCK, E4M3, SUFFIX, Block, grid_shape

Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Spec = tuple[torch.dtype, tuple[int, ...]]
MXFP8 = (1, 32)


def stored_tensors(recipe: Recipe, shape: tuple[int, int], transpose: bool = True) -> dict[str, Spec]:
    """Attribute to (dtype, shape) of a weight [rows, columns]. `transpose`: with what the backward pass needs.

    Raises UserError for an unknown recipe and for a shape that a recipe cannot hold.
    """
    rows, columns = shape
    by_32, by_128 = rows % 32 or columns % 32, rows % 128 or columns % 128
    if recipe in ("delayed", "tensorwise"):
        out: dict[str, Spec] = {"_data": (torch.uint8, (rows, columns)), "_scale_inv": (torch.float32, (1,))}
        return {**out, "_transpose": (torch.uint8, (columns, rows))} if transpose else out
    if recipe not in ("blockwise", "mxfp8"):
        raise UserError(f"fp8_recipe {recipe!r} is not known; known: delayed, tensorwise, blockwise, mxfp8")
    if by_128 if recipe == "blockwise" else by_32:
        raise UserError(f"fp8_recipe {recipe} cannot hold a shard of {rows} x {columns}: both must be multiples of "
                        f"{128 if recipe == 'blockwise' else 32}; choose a smaller tp")
    if recipe == "blockwise":
        row_scale, column_scale, scale_dtype = (rows // 128, _up(columns // 128, 4)), (columns // 128, _up(rows // 128, 4)), torch.float32
        turned = (columns, rows)
    else:
        row_scale, column_scale, scale_dtype = (_up(rows, 128), _up(columns // 32, 4)), (_up(rows // 32, 4), _up(columns, 128)), torch.uint8
        turned = (rows, columns)
    out = {"_rowwise_data": (torch.uint8, (rows, columns)), "_rowwise_scale_inv": (scale_dtype, row_scale)}
    return {**out, "_columnwise_data": (torch.uint8, turned), "_columnwise_scale_inv": (scale_dtype, column_scale)} if transpose else out


def extra_state(recipe: Recipe, num_gemms: int = 1, history: int = 1024) -> dict[str, Spec | str]:
    """What the pickle in `<module>._extra_state` holds. `num_gemms`: 1, or the local experts of a grouped linear layer.

    Only delayed scaling has state that matters: scales and `history` past maxima of input, weight and output (3 a product) forwards,
    gradients of output and input (2) backwards. For the others it is an empty tensor (older releases: the recipe alone). Megatron's
    distributed checkpoints split a grouped layer's entry into `_extra_state`, `_extra_state1`, ... with `num_gemms` 1 each.
    """
    if recipe != "delayed":
        return {}
    return {"recipe": "the recipe, an object of Transformer Engine", "extra_fp8_variables": "a dict of plain values, with num_gemms",
            "scale_fwd": (torch.float32, (3 * num_gemms,)), "amax_history_fwd": (torch.float32, (history, 3 * num_gemms)),
            "scale_bwd": (torch.float32, (2 * num_gemms,)), "amax_history_bwd": (torch.float32, (history, 2 * num_gemms))}


class Codes(NamedTuple):
    """A weight as e4m3 codes [rows, columns] and float32 factors [ceil(rows / block[0]), ceil(columns / block[1])]."""

    codes: torch.Tensor
    scale_inv: torch.Tensor
    block: Block


def is_te_fp8(tensor: Any) -> bool:
    """Whether a parameter is one of Transformer Engine's FP8 tensors, by its attributes."""
    return any(hasattr(tensor, name) for name in ("_rowwise_scale_inv", "_scale_inv"))


def taken_apart(tensor: Any, name: str = "weight") -> Codes:
    """Codes and scales of a Transformer Engine FP8 weight, as views of its memory wherever that is possible.

    A scale for the whole shard becomes a grid of that scale, so that it passes through a layout of 128 x 128 blocks unchanged. Raises
    UserError for codes that are not e4m3, and for scales that were laid out anew for a product of matrices.
    """
    if "E4M3" not in str(getattr(tensor, "_fp8_dtype", "")).upper():
        raise UserError(f"{name}: its FP8 codes are {getattr(tensor, '_fp8_dtype', 'of unknown kind')}; weights must be e4m3")
    if getattr(tensor, "_with_gemm_swizzled_scales", False) or "COMPACT" in str(getattr(tensor, "_data_format", "")):
        raise UserError(f"{name}: its scales are laid out for a product of matrices or a gather; take the weight itself, not a copy made for one")
    if hasattr(tensor, "_scale_inv"):
        codes = _codes(tensor._data) if tensor._data is not None else _codes(tensor._transpose).T
        return Codes(codes, tensor._scale_inv.reshape(1, 1).expand(grid_shape(codes.shape)), BLOCK)
    rows_first = tensor._rowwise_data is not None
    if hasattr(tensor, "_is_2D_scaled"):
        if not rows_first and not tensor._is_2D_scaled:
            raise UserError(f"{name}: it holds only the codes for the backward pass, in blocks of 128 x 1")
        codes = _codes(tensor._rowwise_data) if rows_first else _codes(tensor._columnwise_data).T
        block = BLOCK if tensor._is_2D_scaled else (1, BLOCK[1])
        scale = tensor._rowwise_scale_inv if rows_first and tensor._is_2D_scaled else \
            tensor._rowwise_scale_inv.T if rows_first else tensor._columnwise_scale_inv.T
        return Codes(codes, _trimmed(scale, codes, block), block)
    if not rows_first:
        raise UserError(f"{name}: it holds only the codes for the backward pass, in blocks of 32 x 1")
    codes = _codes(tensor._rowwise_data)
    return Codes(codes, torch.exp2(_trimmed(tensor._rowwise_scale_inv, codes, MXFP8).float() - 127), MXFP8)


def opened(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A model's tensors with every FP8 weight as codes and `<name>_scale_inv`: what `fp8_party` of the `mcore` layout describes.

    From there codes and scales reach an FP8 engine as they are, with no bf16 in between. Raises UserError for weights whose scales are
    not of 128 x 128 blocks: `resharding.fp8.dequantise` (with the block of `taken_apart`) gives their values.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not is_te_fp8(tensor):
            out[name] = tensor
            continue
        codes, scale, block = taken_apart(tensor, name)
        if block != BLOCK:
            raise UserError(f"{name}: its scales are of blocks of {block[0]} x {block[1]}, which an engine with 128 x 128 blocks cannot hold; "
                            "train with fp8_recipe blockwise, or without fp8_param so that the sync quantises")
        out[name], out[name + SUFFIX] = codes, scale
    return out


def _codes(data: torch.Tensor) -> torch.Tensor:
    return data.view(E4M3)


def _trimmed(scale: torch.Tensor, codes: torch.Tensor, block: Block) -> torch.Tensor:
    """Scales without the padding that products of matrices ask for."""
    rows, columns = grid_shape(codes.shape, block)
    return scale[:rows, :columns]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
