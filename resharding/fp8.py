"""FP8 weights with block scales, as DeepSeek-V3's files have them: e4m3 codes, and one float32 factor for each 128 x 128 block.

    weight[i, j] = code[i, j] * scale_inv[i // 128, j // 128]          scale_inv = (largest magnitude in the block) / 448

The scales of `<name>` [rows, columns] are called `<name>_scale_inv` [ceil(rows / 128), ceil(columns / 128)]: the last blocks of a row
or column may be partial. Stacked experts have a leading dimension in both. A block of zeros, or of values so small that the factor
would be a subnormal number, has scale 1. Source: the FP8 section of the README_WEIGHTS of deepseek-ai/DeepSeek-V3, and
`weight_dequant` in its inference/kernel.py.

Functions on a *region* take part of a canonical tensor, wherever it is cut, and give the same bits as the whole tensor would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from parallel.errors import UserError
from resharding.boxes import Box, shape_of, whole

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = (128, 128)
SUFFIX = "_scale_inv"

Block = tuple[int, int]


def grid_shape(shape: Sequence[int], block: Block = BLOCK) -> tuple[int, ...]:
    """The shape of the scales of a weight of `shape` [..., rows, columns]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def touched(region: Box, block: Block = BLOCK) -> Box:
    """The blocks that a region ((row, row), (column, column)) of a weight touches, as a region of its scales."""
    return tuple((start // size, -(-stop // size)) for (start, stop), size in zip(region, block, strict=True))


def quantise(weight: torch.Tensor, block: Block = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale_inv) of a weight [rows, columns] or stacked weights [experts, rows, columns] in any floating dtype."""
    if weight.dim() == 3:
        parts = [quantise(one, block) for one in weight]
        return torch.stack([codes for codes, _ in parts]), torch.stack([scale for _, scale in parts])
    region = whole(weight.shape)
    scale = scale_of(region_amax(weight, region, block))
    return quantise_region(weight, scale, region, block), scale


def region_amax(values: torch.Tensor, region: Box, block: Block = BLOCK) -> torch.Tensor:
    """The largest magnitudes (float32, NaN where there is one) of the parts of `values` in each block that its region touches."""
    (first, _), (left, right) = region
    grid = torch.zeros(shape_of(touched(region, block)), dtype=torch.float32, device=values.device)
    width = block[1] * grid.shape[1]
    for i, rows in _by_blocks(region[0], block[0]):
        columns = values[rows.start - first:rows.stop - first].abs().amax(0).float()
        if right - left < width:  # up to whole blocks; zeros change no maximum
            columns = torch.nn.functional.pad(columns, (left % block[1], width - left % block[1] - (right - left)))
        grid[i] = columns.view(-1, block[1]).amax(1)
    return grid


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """scale_inv of blocks by their largest magnitude."""
    scale = amax / E4M3_MAX
    return torch.where(scale < torch.finfo(torch.float32).smallest_normal, torch.ones_like(scale), scale)


def quantise_region(values: torch.Tensor, scale: torch.Tensor, region: Box, block: Block = BLOCK) -> torch.Tensor:
    """The codes of `values`, which sit at `region` of a weight. `scale`: scale_inv of the blocks `touched` by the region."""
    out = torch.empty(values.shape, dtype=E4M3, device=values.device)
    for rows, part, factors, wide in _scaled(values, scale, region, block):
        out[rows].copy_(wide.copy_(part).div_(factors).clamp_(-E4M3_MAX, E4M3_MAX))
    return out


def dequantise(codes: torch.Tensor, scale_inv: torch.Tensor | None, block: Block = BLOCK, dtype: torch.dtype = torch.bfloat16,
               name: str = "weight") -> torch.Tensor:
    """The weight [rows, columns] or [experts, rows, columns] in `dtype`: products in float32, rounded once.

    Raises UserError that names the weight (`name`) and its scale where the scale is missing or has the wrong shape.
    """
    check_scale(name, tuple(codes.shape), None if scale_inv is None else tuple(scale_inv.shape), block)
    assert scale_inv is not None
    if codes.dim() == 3:
        return torch.stack([dequantise(c, s, block, dtype, name) for c, s in zip(codes, scale_inv, strict=True)])
    return dequantise_region(codes, scale_inv, whole(codes.shape), block, dtype)


def dequantise_region(codes: torch.Tensor, scale_grid: torch.Tensor, region: Box, block: Block = BLOCK,
                      dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The part of a weight at `region` ((row, row), (column, column)), which need not be aligned with its blocks, in `dtype`.

    `codes` are those of the region; `scale_grid` are the scales of the whole weight.
    """
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    (top, bottom), (left, right) = touched(region, block)
    for rows, part, factors, wide in _scaled(codes, scale_grid[top:bottom, left:right], region, block):
        out[rows].copy_(decoded(part, wide).mul_(factors))
    return out


def decoded(codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The values of e4m3 codes in float32, bit for bit those of `codes.to(torch.float32)`, which is several times slower on a CPU.

    A code's bits, moved up by 7 under its sign, are a float16 of 1/256 of its value: the exponents' biases are 7 and 15, and subnormal
    codes become subnormal numbers. Only NaN would come out as 480.
    """
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device) if out is None else out
    if codes.device.type != "cpu" or not codes.numel() or codes.view(torch.int8).max() == 0x7F or codes.view(torch.uint8).max() == 0xFF:
        return out.copy_(codes)
    moved = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign was extended into bit 14
    return out.copy_(moved.view(torch.float16)).mul_(256)


def check_scale(name: str, shape: tuple[int, ...], scale_shape: tuple[int, ...] | None, block: Block = BLOCK) -> None:
    """Raise UserError where an FP8 weight of `shape` has no scale, or one that is not its grid of blocks."""
    grid = grid_shape(shape, block)
    if scale_shape is None:
        raise UserError(f"{name} {list(shape)} is stored as FP8 codes, but its scale {name}{SUFFIX} {list(grid)} is missing; "
                        "without it the weights would be wrong by their scale")
    if scale_shape != grid:
        raise UserError(f"{name}{SUFFIX} has shape {list(scale_shape)}; {name} {list(shape)} in blocks of {block[0]} x {block[1]} "
                        f"needs {list(grid)}. Check weight_block_size in quantization_config")


def _by_blocks(span: tuple[int, int], size: int) -> Iterator[tuple[int, range]]:
    """(number from 0 on, rows) of every block of rows that [start, stop) touches."""
    start, stop = span
    for i, low in enumerate(range(start - start % size, stop, size)):
        yield i, range(max(low, start), min(low + size, stop))


def _scaled(values: torch.Tensor, scale: torch.Tensor, region: Box,
            block: Block) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(rows, those values, the factor of each column, float32 memory of that size) of every block of rows that the region touches."""
    (first, _), (left, right) = region
    if tuple(scale.shape) != shape_of(touched(region, block)) or tuple(values.shape) != shape_of(region):
        raise ValueError(f"values {tuple(values.shape)} at {region} cannot have scales {tuple(scale.shape)} in blocks {block}")
    start = left % block[1]
    columns = scale.to(values.device, torch.float32).repeat_interleave(block[1], 1)[:, start:start + right - left]
    wide = torch.empty(min(block[0], values.shape[0]), right - left, dtype=torch.float32, device=values.device)
    for i, span in _by_blocks(region[0], block[0]):
        rows = slice(span.start - first, span.stop - first)
        yield rows, values[rows], columns[i], wide[:len(span)]
