"""A checksum of every canonical tensor that does not depend on how the tensor is cut, at the speed at which memory is read.

A canonical row (the last dimension) is read as 64-bit little-endian words: element c fills bits from 8 * itemsize * (c mod n) of
word c // n, n = 8 / itemsize; the last word of a row is filled up with zeros. 64 words, 512 bytes, are a block.

    checksum = sum over words of word * row(r) * (block(w // 64) + [r mod 64 = 0] * 2 * place(w))   (mod 2^64)

for word w of row r, with odd pseudo-random weights: splitmix64 (Steele, Lea, Flood, OOPSLA 2014) with a stream for places, blocks
and rows each, and one more for each further leading dimension, whose weights multiply too. A tensor of one dimension is row 0.

It is a sum with weights that depend on the canonical position alone, so disjoint regions add up to the whole, wherever they are cut.
What it notices:

- always: one changed element, whatever its bits (every weight is odd, so no bit is multiplied away);
- but for a chance of about 2^-63: tensors, experts, shards, rows or 512-byte blocks of a row in another place, and any other change
  that does not keep the plain sum of a block's words;
- but for the same chance: words in another place inside their block, where this reaches a row whose index is a multiple of 64 (every
  matrix whose columns are permuted, and every vector).

What it does not notice: words that changed places inside one block of one row and in none of the rows 0, 64, 128, ...; and, as in
any sum modulo 2^64 with odd weights, words that changed places and differ in their top bit alone (the sign of the last of their
elements). Where only the last elements of words are permuted among each other, the chance is that of their few bits, about 2^-15.
The reason for weighing single words in one row of 64 only: a plain sum of 64 words costs a quarter of 64 products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from resharding.boxes import Box, first_overlap, outermost
from resharding.errors import WeightsError
from resharding.layout import Layout

MASK = (1 << 64) - 1
BLOCK = 64  # words
SAMPLED = 64  # every so many rows, single words are weighted
CHUNK = 1 << 19  # elements that are cast or copied at a time: they stay in cache
PLACES, BLOCKS, ROWS = 0, 1, 2  # streams of weights; a leading dimension d in front of the rows has ROWS + 1, ...


def region_checksum(values: torch.Tensor, region: Box, dtype: torch.dtype) -> torch.Tensor:
    """Checksum (int64 scalar, mod 2^64) of `values` [shape of region], which sit at `region` of their canonical tensor."""
    if len(region) > 2:
        (start, stop), rest = region[0], region[1:]
        each = [region_checksum(part, rest, dtype) for part in values]
        return times(torch.stack(each)[None], weights(ROWS + len(rest) - 1, start, stop, values.device))[0]
    if len(region) < 2:
        values, region = values.reshape(1, -1), ((0, 1), *(region or ((0, 1),)))
    (first, last), (left, right) = region
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if first == last or left == right:
        return total
    per_word = 8 // dtype.itemsize
    words = _words(values, left, dtype)
    if words is not None:
        return _rows_checksum(words, first, left // per_word)
    lead, count = left % per_word, -(-right // per_word) - left // per_word
    rows = max(1, CHUNK // values.shape[1])
    buffer = torch.zeros(min(rows, values.shape[0]), count * per_word, dtype=dtype, device=values.device)
    for start in range(0, values.shape[0], rows):
        part = buffer[:min(rows, values.shape[0] - start)]
        part[:, lead:lead + values.shape[1]].copy_(values[start:start + rows])
        total += _rows_checksum(part.view(torch.int64), first + start, left // per_word)
    return total


def _words(values: torch.Tensor, left: int, dtype: torch.dtype) -> torch.Tensor | None:
    """`values` [rows, columns] from canonical column `left` on, seen as whole words in place; None where they must be copied."""
    per_word = 8 // dtype.itemsize
    sizes = (left, values.shape[1], values.storage_offset(), values.stride(0))
    if values.dtype != dtype or values.stride(1) != 1 or any(size % per_word for size in sizes):
        return None
    return values.view(torch.int64)


def _rows_checksum(words: torch.Tensor, first: int, left: int) -> torch.Tensor:
    """The sum over `words` [rows, words], which sit at row `first` and word `left` of the canonical tensor."""
    rows, count = words.shape
    start = -first % SAMPLED
    if rows == 1:
        by_row = times(words, _single(start == 0, left, left + count, words.device))
    else:
        by_row = block_sums(words, left)
        if start < rows:
            by_row[start::SAMPLED] += times(words[start::SAMPLED], places(left, left + count, words.device))
    by_rows = weights(ROWS, first, first + rows, words.device)
    return torch.dot(by_row, by_rows) if by_row.device.type == "cpu" else (by_row * by_rows).sum()


def block_sums(words: torch.Tensor, left: int) -> torch.Tensor:
    """[rows]: the words of every row, weighted by their blocks."""
    (rows, count), right, device = words.shape, left + words.shape[1], words.device
    for size in (BLOCK, BLOCK // 2, BLOCK // 4):  # sums of whole blocks or, where none is cut elsewhere, of parts of them
        if not left % size and not count % size:
            return times(words.view(rows, -1, size).sum(-1), weights(BLOCKS, left // size, right // size, device, BLOCK // size))
    if count < 2 * BLOCK:  # cheaper than short sums
        return times(words, weights(BLOCKS, left, right, device, BLOCK))
    head, tail = -left % BLOCK, count - right % BLOCK
    sums = [words[:, head:tail].view(rows, -1, BLOCK).sum(-1)]
    sums = [words[:, :head].sum(-1, keepdim=True), *sums] if head else sums
    sums = [*sums, words[:, tail:].sum(-1, keepdim=True)] if tail < count else sums
    return times(torch.cat(sums, 1), weights(BLOCKS, left // BLOCK, -(-right // BLOCK), device))


def times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Matrix [rows, n] times vector [n] modulo 2^64; CUDA has no integer product of matrices."""
    return torch.mv(matrix, vector) if matrix.device.type == "cpu" else (matrix * vector).sum(-1)


@lru_cache(maxsize=1024)  # every layer asks for the same few
def weights(stream: int, start: int, stop: int, device: torch.device, repeat: int = 1) -> torch.Tensor:
    """Odd weights of positions [start, stop), of which `repeat` in turn have the same one."""
    table = _stream(stream, 1 << max(10, (-(-stop // repeat) - 1).bit_length()), device)
    return table[start:stop] if repeat == 1 else table[torch.arange(start, stop, device=device) // repeat]


@lru_cache(maxsize=1024)
def places(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """The even part of the weights of words [start, stop) of a row in which single words count."""
    return 2 * weights(PLACES, start, stop, device)


@lru_cache(maxsize=1024)
def _single(sampled: bool, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """All that words [start, stop) of one row are multiplied by, but for the row's weight."""
    blocks = weights(BLOCKS, start, stop, device, BLOCK)
    return blocks + places(start, stop, device) if sampled else blocks


@lru_cache(maxsize=64)
def _stream(stream: int, count: int, device: torch.device) -> torch.Tensor:
    """The first `count` odd weights of a stream of splitmix64."""
    x = torch.arange(count, dtype=torch.int64, device=device)
    x = (x + 1 + (stream << 40)) * _signed(0x9E3779B97F4A7C15)
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
    seen: dict[str, dict[Box, tuple[int, str, int]]] = defaultdict(dict)  # value, local tensor, rank
    for layout, sums in zip(layouts, values, strict=True):
        if len(sums) != sum(len(local.pieces) for local in layout.tensors):
            raise ValueError(f"{len(sums)} checksums of rank {layout.rank} do not belong to its {layout.kind} layout")
        left = iter(sums)
        for local in layout.tensors:
            for piece, value in zip(local.pieces, left):
                if piece.canonical is None:
                    continue
                here = (value, local.name, layout.rank)
                first = seen[piece.canonical].setdefault(piece.region, here)
                if first[0] != value:
                    raise WeightsError(f"{piece.canonical}: the copies in {_where(first)} and in {_where(here)} ({layout.kind}) differ; "
                                       "they must be identical. Reload the weights from a checkpoint or synchronise again")
    out = {}
    for canonical, regions in seen.items():
        if len(regions) > 1 and first_overlap(tuple(regions)):  # a copy of part of another, which cannot be compared with it, is left aside
            regions = {region: regions[region] for region in outermost(regions)}
            if overlap := first_overlap(tuple(regions)):
                raise ValueError(f"{canonical}: regions {overlap[0]} and {overlap[1]} overlap without being the same; they cannot be added up")
        out[canonical] = sum(value for value, _, _ in regions.values()) & MASK
    if expected is not None:
        _compare(out, expected, seen)
    return out


def _where(held: tuple[int, str, int]) -> str:
    return f"{held[1]} on rank {held[2]}"


def _compare(found: Mapping[str, int], expected: Mapping[str, int], seen: Mapping[str, Mapping[Box, tuple[int, str, int]]]) -> None:
    if missing := [name for name in expected if name not in found]:
        raise WeightsError(f"{missing[0]}: no rank holds it, but a checksum of it is expected ({len(missing)} such tensors)")
    wrong = [name for name, value in found.items() if expected.get(name) != value]
    if wrong:
        more = f" (and {len(wrong) - 1} more tensors: {', '.join(wrong[1:6])})" if len(wrong) > 1 else ""
        wanted = f"{expected[wrong[0]]:#018x}" if wrong[0] in expected else "none"
        raise WeightsError(f"{wrong[0]}: checksum {found[wrong[0]]:#018x} is not the expected {wanted}; "
                           f"it is made of {', '.join(map(_where, seen[wrong[0]].values()))}{more}. Synchronise the weights again")
