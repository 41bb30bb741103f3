"""A checksum of every canonical tensor that does not depend on how the tensor is cut.

    checksum = sum over elements of bits(element) * w_0[i_0] * w_1[i_1] * ...   (mod 2^64)

with the position (i_0, i_1, ...) in the *canonical* tensor and odd pseudo-random weights w_d for each dimension d. Sums of
disjoint regions add up to the whole; any single changed bit changes the sum (the factor is odd), and so do, but for a
chance of about 2^-63, permuted rows, columns, experts or shards. Weights: splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from resharding.boxes import Box, first_overlap
from resharding.errors import WeightsError
from resharding.layout import Layout

MASK = (1 << 64) - 1
CHUNK = 1 << 17  # elements widened to int64 at a time: 1 MB stays in cache
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def piece_checksums(layout: Layout, tensors: Mapping[str, torch.Tensor],
                    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None) -> list[int]:
    """The checksum of every piece, in the order of `layout.tensors` and their pieces (0 for padding).

    `dtype`, one for all or by canonical name: values are cast to it first, as a move to that destination does.
    """
    sums: list[torch.Tensor] = []
    for local in layout.tensors:
        tensor = tensors[local.name].detach()
        for piece in local.pieces:
            if piece.canonical is None:
                sums.append(torch.zeros((), dtype=torch.int64, device=tensor.device))
                continue
            target = dtype.get(piece.canonical, local.dtype) if isinstance(dtype, Mapping) else dtype or local.dtype
            sums.append(region_checksum(piece.of(tensor), piece.region, target))
    return [value & MASK for value in torch.stack(sums).tolist()] if sums else []


def region_checksum(values: torch.Tensor, region: Box, dtype: torch.dtype) -> torch.Tensor:
    """Checksum (int64 scalar, mod 2^64) of `values` [shape of region], which sit at `region` of their canonical tensor."""
    if not region:
        return values.to(dtype).view(_BITS[dtype.itemsize]).to(torch.int64)
    weights = [_weights(dim, start, stop, values.device) for dim, (start, stop) in enumerate(region)]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, CHUNK // max(1, values[:1].numel()))
    for start in range(0, values.shape[0], rows):
        bits = values[start:start + rows].to(dtype).contiguous().view(_BITS[dtype.itemsize]).to(torch.int64)
        for weight in reversed(weights[1:]):
            bits = (bits * weight).sum(-1)  # not in place: 8-byte values are a view of the tensor itself
        total += (bits * weights[0][start:start + rows]).sum()
    return total


@lru_cache(maxsize=256)  # every layer asks for the same few
def _weights(dim: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Odd weights of positions [start, stop) along dimension `dim`: splitmix64 with a stream per dimension."""
    x = torch.arange(start, stop, dtype=torch.int64, device=device)
    x = (x + 1 + (dim << 40)) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (torch shifts the sign in)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def verify(layouts: Sequence[Layout], values: Sequence[Sequence[int]], expected: Mapping[str, int] | None = None) -> dict[str, int]:
    """Combine the piece checksums of all ranks of a party into the checksum of every canonical tensor.

    `values[i]` is `piece_checksums` of `layouts[i]`. The same region on several ranks (or twice on one: tied heads) is a
    replica and must be equal; distinct regions are disjoint and add up. Raises WeightsError that names canonical tensor,
    local tensors and ranks where replicas differ or the sum is not `expected`.
    """
    seen: dict[str, dict[Box, tuple[int, str]]] = defaultdict(dict)
    for layout, sums in zip(layouts, values, strict=True):
        named = [(local.name, piece) for local in layout.tensors for piece in local.pieces]
        for (name, piece), value in zip(named, sums, strict=True):
            if piece.canonical is None:
                continue
            where = f"{name} on rank {layout.rank}"
            first, first_where = seen[piece.canonical].setdefault(piece.region, (value, where))
            if first != value:
                raise WeightsError(f"{piece.canonical}: the copies in {first_where} and in {where} ({layout.kind}) differ; "
                                   "they must be identical. Reload the weights from a checkpoint or synchronise again")
    out = {}
    for canonical, regions in seen.items():
        if overlap := first_overlap(tuple(regions)):
            raise ValueError(f"{canonical}: regions {overlap[0]} and {overlap[1]} overlap without being the same; they cannot be added up")
        out[canonical] = sum(value for value, _ in regions.values()) & MASK
    if expected is not None:
        _compare(out, expected, {c: ", ".join(where for _, where in regions.values()) for c, regions in seen.items()})
    return out


def _compare(found: Mapping[str, int], expected: Mapping[str, int], where: Mapping[str, str]) -> None:
    if missing := [name for name in expected if name not in found]:
        raise WeightsError(f"{missing[0]}: no rank holds it, but a checksum of it is expected ({len(missing)} such tensors)")
    wrong = [name for name, value in found.items() if expected.get(name) != value]
    if wrong:
        more = f" (and {len(wrong) - 1} more tensors: {', '.join(wrong[1:6])})" if len(wrong) > 1 else ""
        wanted = f"{expected[wrong[0]]:#018x}" if wrong[0] in expected else "none"
        raise WeightsError(f"{wrong[0]}: checksum {found[wrong[0]]:#018x} is not the expected {wanted}; "
                           f"it is made of {where[wrong[0]]}{more}. Synchronise the weights again")
