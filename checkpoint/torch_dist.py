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
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from checkpoint.safe_pickle import read_metadata
from checkpoint.torch_archive import find_values
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
        self._maps: dict[str, mmap.mmap] = {}
        self._taken: list[Place] = []
        self._starts: dict[Place, tuple[int, torch.dtype, tuple[int, ...]] | None] = {}

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
        if place not in self._starts:
            view = memoryview(self._map(place.file))[place.offset:place.offset + place.length]
            try:
                found = find_values(_Reader(view))  # type: ignore[arg-type]
            except ValueError as error:
                raise UserError(f"{self.directory / place.file}: the chunk at {place.offset} cannot be read: {error}; the checkpoint is damaged") from None
            self._starts[place] = (found.start, found.dtype, found.shape) if found else None
        where = self._starts[place]
        if where is None:
            data = bytes(memoryview(self._map(place.file))[place.offset:place.offset + place.length])
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True).to(dtype)  # type: ignore[no-any-return]
        self._taken.append(place)
        if sum(p.length for p in self._taken) > RESIDENT:
            self.release(keep=1)
        start, stored, shape = where
        if not torch.Size(shape).numel():
            return torch.empty(shape, dtype=stored)
        flat = torch.frombuffer(self._map(place.file), dtype=torch.uint8, count=torch.Size(shape).numel() * stored.itemsize, offset=place.offset + start)
        if (place.offset + start) % stored.itemsize:  # archives follow each other without padding
            flat = flat.clone()
        return flat.view(stored).view(shape)

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with open(self.directory / file, "rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]

    def release(self, keep: int = 0) -> None:
        """Give back the pages of all chunks taken so far but the last `keep`. Their values stay valid: they are mapped again."""
        done = self._taken[:len(self._taken) - keep]
        for place in done:
            first = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._maps[place.file].madvise(mmap.MADV_DONTNEED, first, place.offset + place.length - first)
        del self._taken[:len(done)]

    def __enter__(self) -> TorchDistFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._taken.clear()
        self._maps.clear()


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
