"""The files of a `torch_dist` checkpoint: the tensors in them, of which only the chunks that are asked for are touched.

    .metadata          pickled: every key, its shape, dtype and chunks, and where each chunk lies
    __0_0.distcp, ...  chunks, each an archive of torch.save
    common.pt          what is not cut over ranks
    metadata.json      Megatron's description of the format

Formats: torch.distributed.checkpoint of torch 2.13, megatron.core.dist_checkpointing of megatron-core 0.16.1.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from checkpoint.mapped import MappedFiles
from checkpoint.safe_pickle import read_metadata
from checkpoint.torch_archive import Values, find_values
from parallel.errors import UserError
from resharding.boxes import Box, at, intersect, shape_of, slices, volume, whole
from resharding.errors import listed

RESIDENT = 256 << 20  # bytes of the files that stay mapped in memory after they were handed out


@dataclass(frozen=True)
class Place:
    """An archive in a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """`box` of a whole tensor, and where it lies."""

    box: Box
    place: Place


class Chunked:
    """A tensor in chunks: indices select along leading dimensions, slices read. Of a region in one chunk it gives the mapped file itself."""

    def __init__(self, files: TorchDistFiles, key: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: list[Chunk],
                 index: tuple[int, ...] = ()) -> None:
        self.files, self.key, self.dtype, self.shape, self.index, self.chunks = files, key, dtype, torch.Size(shape), index, chunks
        self._below: dict[int, dict[tuple[int, ...], list[Chunk]]] = {}

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if keys and all(isinstance(k, int) for k in keys):
            return self._select(keys)
        box = tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(keys, self.shape, strict=True))
        parts = self.split(box)
        if len(parts) == 1:
            return self._read(*parts[0])
        out = torch.empty(shape_of(box), dtype=self.dtype)
        for part, chunk in parts:
            out[slices(at([a - b for (a, _), (b, _) in zip(part, box)], part))] = self._read(part, chunk)
        return out

    def _select(self, index: tuple[int, ...]) -> Chunked:
        n = len(index)
        if n not in self._below:
            below: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
            for chunk in self.chunks:
                for inside in itertools.product(*(range(*pair) for pair in chunk.box[len(self.index):][:n])):
                    below[inside].append(chunk)
            self._below[n] = below
        return Chunked(self.files, self.key, self.dtype, self.shape[n:], self._below[n].get(index, []), (*self.index, *index))

    def split(self, box: Box) -> list[tuple[Box, Chunk]]:
        """The parts of a region, each in one chunk. Raises UserError where chunks do not cover it."""
        parts = [(common, chunk) for chunk in self.chunks
                 if (common := intersect(chunk.box[len(self.index):], box) if box else box) is not None]
        if sum(volume(part) for part, _ in parts) != volume(box):
            raise UserError(f"{self.files.directory}: the chunks of {self.key} {list(self.index)} do not cover {box} exactly; the checkpoint is damaged")
        return parts

    def _read(self, part: Box, chunk: Chunk) -> Tensor:
        here = self.files.chunk(chunk.place, self.dtype)[tuple(i - a for i, (a, _) in zip(self.index, chunk.box))]
        return here[slices(at([a - b for (a, _), (b, _) in zip(part, chunk.box[len(self.index):])], part))]


class TorchDistFiles(Mapping[str, Chunked]):
    """The tensors of a `torch_dist` checkpoint by key. A context manager; never write to what it gives.

    Resident memory is bounded by about the largest chunk + 256 MB. Raises UserError for a directory that is not such a
    checkpoint, or lacks files or part of one.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        _check_format(self.directory)
        self.metadata = read_metadata(self.directory)
        self._tensors = {key: item for key, item in self.metadata.state_dict_metadata.items() if isinstance(item, TensorStorageMetadata)}
        self._chunks = self._find_chunks()
        self._made: dict[str, Chunked] = {}
        self.mapped = MappedFiles(self.directory)
        self._taken: dict[Place, None] = {}
        self._resident = 0
        self._copies: dict[Place, Tensor] = {}
        self._starts: dict[Place, Values | None] = {}

    def _find_chunks(self) -> dict[str, list[Chunk]]:
        chunks: dict[str, list[Chunk]] = {}
        ends: dict[str, int] = defaultdict(int)
        stored = self.metadata.storage_data
        lost: list[str] = []
        for key, item in self._tensors.items():
            chunks[key] = []
            by_offset = {tuple(c.offsets): tuple(c.sizes) for c in item.chunks}
            for offset, size in by_offset.items():
                info = stored.get(MetadataIndex(key, offset))
                if info is None:
                    lost.append(key)
                    continue
                place = Place(str(info.relative_path), int(info.offset), int(info.length))
                ends[place.file] = max(ends[place.file], place.offset + place.length)
                chunks[key].append(Chunk(at(offset, whole(size)), place))
        if lost:
            raise UserError(f"{self.directory}: .metadata does not say where {listed(lost)} are; the checkpoint is damaged")
        _check_files(self.directory, ends)
        return chunks

    def __getitem__(self, key: str) -> Chunked:
        if key not in self._made:  # it finds its chunks by index once
            item = self._tensors[key]
            self._made[key] = Chunked(self, key, item.properties.dtype, tuple(item.size), self._chunks[key])
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def chunk(self, place: Place, dtype: torch.dtype) -> Tensor:
        """The tensor of an archive, over the mapped file where it is stored plainly."""
        if place in self._copies:
            return self._copies[place]
        if place not in self._starts:
            self._starts[place] = self._find(place)
        where, data = self._starts[place], self._archive(place)
        if where is None:
            return self._copied(place, torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True).to(dtype))
        self._take(place)
        data = data[where.start:where.start + torch.Size(where.shape).numel() * where.dtype.itemsize]
        if (place.offset + where.start) % where.dtype.itemsize:  # archives may follow each other without padding
            return self._copied(place, data.clone().view(where.dtype).view(where.shape))
        return data.view(where.dtype).view(where.shape)

    def _archive(self, place: Place) -> Tensor:
        return self.mapped.bytes(place.file)[place.offset:place.offset + place.length]

    def _find(self, place: Place) -> Values | None:
        try:
            return find_values(_Reader(memoryview(self._archive(place).numpy())))  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"{self.directory / place.file}: the chunk at {place.offset} cannot be read: {error}; the checkpoint is damaged") from None

    def _copied(self, place: Place, values: Tensor) -> Tensor:
        """Keep the last copies that had to be made: a chunk is asked for many times in a row."""
        self._copies[place] = values
        while len(self._copies) > 4:
            del self._copies[next(iter(self._copies))]
        return values

    def _take(self, place: Place) -> None:
        """Remember what was handed out; the pages of what was handed out long ago are given back."""
        if place not in self._taken:
            self._taken[place] = None
            self._resident += place.length
            while self._resident > RESIDENT and len(self._taken) > 1:
                old = next(iter(self._taken))
                del self._taken[old]
                self._resident -= old.length
                self.mapped.forget(old.file, old.offset, old.offset + old.length)

    def __enter__(self) -> TorchDistFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._taken.clear()
        self._copies.clear()
        self.mapped.close()


class _Reader(io.RawIOBase):
    """A file over part of a memory map."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._at:self._at + len(buffer)]
        buffer[:len(part)] = part
        self._at += len(part)
        return len(part)


def _check_format(directory: Path) -> None:
    if not directory.is_dir():
        raise UserError(f"checkpoint {str(directory)!r} does not exist")
    try:
        backend = json.loads((directory / "metadata.json").read_text()).get("sharded_backend", "torch_dist")
    except FileNotFoundError:
        return
    except (ValueError, AttributeError) as error:
        raise UserError(f"{directory / 'metadata.json'} cannot be read: {error}; the checkpoint is damaged") from None
    if backend != "torch_dist":
        raise UserError(f"checkpoint {str(directory)!r} is stored as {backend!r}; only 'torch_dist' is read: save it again with --ckpt-format torch_dist")


def _check_files(directory: Path, ends: Mapping[str, int]) -> None:
    """Raise UserError where a data file is missing or shorter than .metadata says."""
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
    if absent := [file for file in ends if file not in sizes]:
        raise UserError(f"checkpoint {str(directory)!r} is not complete: {listed(sorted(absent))} missing, which .metadata names")
    if short := [f"{file} has {sizes[file]} bytes of {end}" for file, end in ends.items() if sizes[file] < end]:
        raise UserError(f"checkpoint {str(directory)!r} is cut short: {listed(sorted(short), 4)}")
