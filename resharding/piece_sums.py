"""The checksums of all pieces of one rank, with few and large operations.

A sync adds up thousands of pieces, and most are small or lie row by row between others (a norm, a key head of one query group): one
by one, the calls would cost as much as reading the memory. So a local tensor that is made of whole rows is added up row by row in one
go, whatever piece a row belongs to, small pieces are added up together element by element, and the sums of rows and elements are
then dealt to their pieces. What is neither goes through `region_checksum`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from resharding.boxes import Box, volume
from resharding.checksum import BLOCK, BLOCKS, CHUNK, MASK, PLACES, ROWS, SAMPLED, block_sums, places, region_checksum, times, weights
from resharding.layout import Layout, LocalTensor, Piece
from resharding.plan import Copy
from resharding.transform import CAST, Transform

SMALL = 1 << 13  # elements up to which a piece is added up element by element: that reads 8 bytes of weights for each


def piece_checksums(layout: Layout, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
                    transform: Transform = CAST) -> list[int]:
    """`PieceSums` of one reading."""
    return PieceSums(layout, dtype, transform)(tensors)


@dataclass(frozen=True)
class _Rows:
    """A local tensor made of whole canonical rows. `left`: the first column of all of them; by row [rows]: `weights` (0 in padding), the
    `pieces` they belong to, and which ones, `sampled`, are among those in which single words count (mostly every 64th: a slice)."""

    name: str
    left: int
    weights: torch.Tensor
    pieces: torch.Tensor
    sampled: torch.Tensor | slice


@dataclass(frozen=True)
class _Elements:
    """Small pieces of one dtype: their elements one after the other, with `weights` and `pieces` [elements]."""

    parts: tuple[tuple[str, Piece], ...]
    weights: torch.Tensor
    pieces: torch.Tensor


class PieceSums:
    """Called with a rank's tensors: the checksum of every piece, in the order of `layout.tensors` and their pieces (0 for padding).

    `dtype`, one for all or by canonical name: values are cast to it first, as a move to that destination does. `transform`: they
    are read through it first, as that move reads them. What can be known before the tensors is worked out once.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype | Mapping[str, torch.dtype] | None = None, transform: Transform = CAST) -> None:
        self._layout, self._dtype, self._transform = layout, dtype, transform
        self._known: tuple[object, list[_Rows], list[_Elements], list[tuple[int, LocalTensor, Piece]]] | None = None

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        rows, elements, others = self._sorted(tensors)
        out = [0] * sum(len(local.pieces) for local in self._layout.tensors)
        for values, pieces in (*_row_sums(rows, tensors), *_element_sums(elements, tensors)):
            by_piece = torch.zeros(len(out), dtype=torch.int64, device=values.device).index_add_(0, pieces, values)
            out = [(a + b) & MASK for a, b in zip(out, by_piece.tolist(), strict=True)]
        sums = [self._one(local, piece, tensors) for _, local, piece in others]
        for (number, _, _), value in zip(others, _integers(sums), strict=True):
            out[number] = value
        return out

    def _target(self, local: LocalTensor, piece: Piece) -> torch.dtype:
        assert piece.canonical is not None
        return self._dtype.get(piece.canonical, local.dtype) if isinstance(self._dtype, Mapping) else self._dtype or local.dtype

    def _one(self, local: LocalTensor, piece: Piece, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        target = self._target(local, piece)
        if self._transform is CAST:
            return region_checksum(piece.of(tensors[local.name].detach()), piece.region, target)
        parts = [region_checksum(self._transform.read(copy, tensors), copy.region, target) for copy in _slabs(local, piece, target)]
        return torch.stack(parts).sum()

    def _sorted(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[_Rows], list[_Elements], list[tuple[int, LocalTensor, Piece]]]:
        """How each piece is added up; kept for as long as the tensors are laid out in the same way."""
        held = [tensors[local.name] for local in self._layout.tensors]
        key = [(t.device, t.dtype, t.is_contiguous()) for t in held]
        if self._known is None or self._known[0] != key:
            rows: list[_Rows] = []
            small: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, Piece]]] = defaultdict(list)
            others: list[tuple[int, LocalTensor, Piece]] = []
            number = 0
            for local, tensor in zip(self._layout.tensors, held, strict=True):
                pieces = [(number + i, piece) for i, piece in enumerate(local.pieces) if piece.canonical is not None]
                number += len(local.pieces)
                plain = self._transform is CAST and all(self._target(local, piece) == tensor.dtype for _, piece in pieces)
                if plain and tensor.is_contiguous() and (whole := _whole_rows(local, tensor, pieces)):
                    rows.append(whole)
                    continue
                for i, piece in pieces:
                    if plain and volume(piece.region) <= SMALL:
                        small[tensor.device, tensor.dtype].append((i, local.name, piece))
                    else:
                        others.append((i, local, piece))
            self._known = key, rows, [_elements(dtype, device, parts) for (device, dtype), parts in small.items()], others
        return self._known[1:]


def _whole_rows(local: LocalTensor, tensor: torch.Tensor, pieces: Sequence[tuple[int, Piece]]) -> _Rows | None:
    """None where a piece is not made of whole rows of the local tensor, of whole words, all from the same canonical column on."""
    columns, count = tensor.shape[-1] if tensor.dim() else 0, math.prod(tensor.shape[:-1])
    per_word = 8 // tensor.dtype.itemsize
    lefts = {piece.region[-1][0] if piece.region else -1 for _, piece in pieces}
    if len(lefts) != 1 or tensor.numel() <= SMALL or any(n % per_word for n in (columns, tensor.storage_offset(), *lefts)):
        return None
    ids = torch.arange(count).view(tensor.shape[:-1])
    by_row, owner, sampled = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64), []
    for number, piece in pieces:
        rest = tensor.dim() - len(piece.view.index)
        if rest != len(piece.region) or rest > 2 or piece.view.transposed or piece.place[-1] != (0, columns) or (rest == 1 and piece.view.step > 1):
            return None
        at = ids[piece.view.index]
        first, last = piece.region[0] if rest == 2 else (0, 1)
        at = at[piece.view.start::piece.view.step][slice(*piece.place[0])] if rest == 2 else at.reshape(1)
        by_row[at], owner[at] = weights(ROWS, first, last, torch.device("cpu")), number
        sampled.append(at[-first % SAMPLED::SAMPLED])
    left, device = lefts.pop() // per_word, tensor.device
    return _Rows(local.name, left, by_row.to(device), owner.to(device), _as_slice(torch.cat(sampled).sort().values.to(device)))


def _as_slice(index: torch.Tensor) -> torch.Tensor | slice:
    """Rows in equal steps as a slice, which copies nothing."""
    steps = index.diff().unique()
    return slice(int(index[0]), int(index[-1]) + 1, int(steps[0])) if len(steps) == 1 and steps[0] > 0 else index


def _row_sums(rows: Sequence[_Rows], tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """By device, the weighted sums of all rows and their pieces."""
    sums: dict[torch.device, list[tuple[torch.Tensor, _Rows]]] = defaultdict(list)
    for tensor_rows in rows:
        tensor = tensors[tensor_rows.name].detach()
        words = tensor.view(torch.int64).view(len(tensor_rows.weights), -1)
        by_row = block_sums(words, tensor_rows.left)
        single = places(tensor_rows.left, tensor_rows.left + words.shape[1], words.device)
        by_row[tensor_rows.sampled] += times(words[tensor_rows.sampled], single)
        sums[tensor.device].append((by_row.mul_(tensor_rows.weights), tensor_rows))
    for together in sums.values():
        yield torch.cat([by_row for by_row, _ in together]), torch.cat([tensor_rows.pieces for _, tensor_rows in together])


def _elements(dtype: torch.dtype, device: torch.device, parts: Sequence[tuple[int, str, Piece]]) -> _Elements:
    by_element = [_element_weights(piece.region, dtype).reshape(-1) for _, _, piece in parts]
    owners = torch.repeat_interleave(torch.tensor([number for number, _, _ in parts]), torch.tensor([len(w) for w in by_element]))
    return _Elements(tuple((name, piece) for _, name, piece in parts), torch.cat(by_element).to(device), owners.to(device))


def _element_weights(region: Box, dtype: torch.dtype) -> torch.Tensor:
    """What each element's bits are multiplied by, in the shape of `region`: its word's weight, shifted to its place in the word."""
    cpu = torch.device("cpu")
    *leading, rows, (left, right) = [(0, 1)] * (2 - len(region)) + list(region)
    per_word = 8 // dtype.itemsize
    column = torch.arange(left, right)
    word = column // per_word
    block, single = weights(BLOCKS, 0, right // per_word // BLOCK + 1, cpu)[word // BLOCK], 2 * weights(PLACES, 0, right // per_word + 1, cpu)[word]
    row = torch.arange(*rows)
    out = torch.where((row % SAMPLED == 0)[:, None], block + single, block) * weights(ROWS, *rows, cpu)[:, None]
    out = out << (8 * dtype.itemsize * (column % per_word))
    for depth, (start, stop) in enumerate(reversed(leading)):
        out = weights(ROWS + 1 + depth, start, stop, cpu).view(-1, *[1] * out.dim()) * out
    return out.reshape([stop - start for start, stop in region])


def _element_sums(elements: Sequence[_Elements], tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for some in elements:
        values = torch.cat([piece.of(tensors[name].detach()).reshape(-1) for name, piece in some.parts])
        bits = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]).long()
        if values.dtype.itemsize in (2, 4):
            bits &= (1 << 8 * values.dtype.itemsize) - 1
        yield bits.mul_(some.weights), some.pieces


def _integers(sums: Sequence[torch.Tensor]) -> list[int]:
    """One transfer from every device, not one for every sum."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, value in enumerate(sums):
        by_device[value.device].append(i)
    out = [0] * len(sums)
    for members in by_device.values():
        for i, value in zip(members, torch.stack([sums[i] for i in members]).tolist(), strict=True):
            out[i] = value & MASK
    return out


def _slabs(local: LocalTensor, piece: Piece, dtype: torch.dtype) -> Iterator[Copy]:
    """The piece in slabs of rows, as copies that a transform can read: what it makes of one of them stays small."""
    rows = max(1, 8 * CHUNK // max(1, volume(piece.region[1:]))) if piece.region else 1
    start, stop = piece.region[0] if piece.region else (0, 1)
    for low in range(start, stop, rows):
        high = min(low + rows, stop)
        region = ((low, high), *piece.region[1:]) if piece.region else ()
        place = ((piece.offset[0] + low - start, piece.offset[0] + high - start), *piece.place[1:]) if piece.region else ()
        yield Copy(0, local.name, place, 0, "", place, piece.canonical or "", dtype, region, 0, piece.view, piece.view)
