"""Writing a `torch_dist` checkpoint chunk by chunk: nothing but the chunk at hand is in memory, and no rank is needed to hold it.

What is written is what `torch.distributed.checkpoint` and Megatron's `dist_checkpointing.load` read: see `checkpoint.torch_dist`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.files import sync_directory
from checkpoint.together import gather, on_rank_zero, rank
from checkpoint.torch_archive import ALIGNMENT, after_values, before_values
from resharding.boxes import Box, shape_of, volume
from resharding.layout import LocalTensor

FILE_BYTES = 5 << 30
WRITE_BYTES = 64 << 20  # of one call
# megatron.core.dist_checkpointing.core.CheckpointingConfig
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True)
class _Written:
    key: str
    box: Box
    file: str
    offset: int
    length: int


class TorchDistWriter:
    """Writes chunks into `__{rank}_{number}.distcp` files of at most about `file_bytes`; `close` makes the checkpoint whole.

    `crcs` are size and CRC-32 of the finished files of this rank.
    """

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self.directory, self.file_bytes = directory, file_bytes
        self.crcs: dict[str, tuple[int, int]] = {}
        self._written: list[_Written] = []
        self._file: int | None = None
        self._name, self._crc, self._position = "", 0, 0
        self._checksums = ThreadPoolExecutor(1, "checksums")

    def write(self, key: str, box: Box, dtype: torch.dtype, blocks: Iterable[Tensor]) -> None:
        """Write the chunk `box` of `key`: its values in row-major order, in blocks, each valid until the one after the next is asked for."""
        shape = shape_of(box)
        head = before_values(dtype, shape)
        self._begin(len(head) + volume(box) * dtype.itemsize)
        offset = self._position
        self._append(head)
        crc = self._append_values(memoryview(b.reshape(-1).view(torch.uint8).numpy()) for b in blocks if b.numel())
        self._append(after_values(dtype, shape, crc))
        self._written.append(_Written(key, box, self._name, offset, self._position - offset))
        self._append(b"\0" * (-self._position % ALIGNMENT))

    def _append_values(self, blocks: Iterable[memoryview]) -> int:
        """Returns the CRC-32 of all blocks. Each is computed beside the writing of the same block, and waited for a block later."""
        crc = 0
        waiting: deque[tuple[Future[int], int]] = deque()
        for block in blocks:
            waiting.append((self._checksums.submit(zlib.crc32, block), len(block)))
            self._write(block)
            if len(waiting) > 1:
                crc = self._checked(crc, *waiting.popleft())
        while waiting:
            crc = self._checked(crc, *waiting.popleft())
        return crc

    def _checked(self, crc: int, checksum: Future[int], length: int) -> int:
        self._crc = combined(self._crc, checksum.result(), length)
        return combined(crc, checksum.result(), length)

    def _append(self, part: bytes) -> None:
        self._write(memoryview(part))
        self._crc = zlib.crc32(part, self._crc)

    def _write(self, data: memoryview) -> None:
        assert self._file is not None
        self._position += len(data)
        while len(data):
            data = data[os.write(self._file, data[:WRITE_BYTES]):]

    def _begin(self, length: int) -> None:
        if self._file is not None and self._position and self._position + length > self.file_bytes:
            self._end()
        if self._file is None:
            self._name, self._crc, self._position = f"__{rank()}_{len(self.crcs)}.distcp", 0, 0
            self._file = os.open(self.directory / self._name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def _end(self) -> None:
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self.crcs[self._name] = (self._position, self._crc)
            self._file = None

    def abandon(self) -> None:
        """Close what is open; what was written is not a checkpoint."""
        self._checksums.shutdown()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def close(self, tensors: Mapping[str, LocalTensor], empty_objects: Iterable[str], common: Mapping[str, Any]) -> None:
        """Collective: finish the files, then rank 0 writes `.metadata`, `common.pt` and `metadata.json`.

        `tensors` are all keys; `empty_objects` the keys of objects that are None (`_extra_state`), which all share one place.
        """
        if rank() == 0:
            self._write_empty_object()
        self._end()
        written = [w for part in gather(self._written) for w in part]
        on_rank_zero(lambda: _describe(self.directory, written, tensors, empty_objects, common), f"writing {self.directory}")

    def _write_empty_object(self) -> None:
        out = io.BytesIO()
        torch.save([None], out)  # Megatron writes the objects of a key as a list
        self._begin(len(out.getvalue()))
        offset = self._position
        self._append(out.getvalue())
        self._written.append(_Written("", (), self._name, offset, self._position - offset))


def combined(first: int, second: int, length: int) -> int:
    """CRC-32 of two parts one after the other from that of each; `length` is the second's (zlib's crc32_combine)."""
    return _multiplied(_power(8 * length), first) ^ second


@lru_cache(maxsize=4096)  # chunks repeat few sizes
def _power(n: int) -> int:
    """x to the n modulo the polynomial of CRC-32, bits reflected."""
    out, square = 1 << 31, 1 << 30
    while n:
        if n & 1:
            out = _multiplied(square, out)
        square, n = _multiplied(square, square), n >> 1
    return out


def _multiplied(a: int, b: int) -> int:
    out = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            out ^= b
        b = b >> 1 ^ 0xEDB88320 if b & 1 else b >> 1
    return out


def _describe(directory: Path, written: list[_Written], tensors: Mapping[str, LocalTensor], empty_objects: Iterable[str],
              common: Mapping[str, Any]) -> None:
    described: dict[str, Any] = {key: TensorStorageMetadata(TensorProperties(dtype=t.dtype), torch.Size(t.shape), []) for key, t in tensors.items()}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for w in written:
        place = _StorageInfo(w.file, w.offset, w.length)
        if not w.key:
            described.update((key, BytesStorageMetadata()) for key in empty_objects)
            places.update((MetadataIndex(key), place) for key in empty_objects)
            continue
        offsets = torch.Size(start for start, _ in w.box)
        described[w.key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape_of(w.box))))
        places[MetadataIndex(w.key, offsets, len(described[w.key].chunks) - 1)] = place
    metadata = Metadata(described, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    _write(directory / ".metadata", pickle.dumps(metadata))
    out = io.BytesIO()
    torch.save(dict(common), out)
    _write(directory / "common.pt", out.getvalue())
    _write(directory / "metadata.json", json.dumps(_FORMAT).encode())
    sync_directory(directory)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
