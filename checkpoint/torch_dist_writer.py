"""Writing a `torch_dist` checkpoint chunk by chunk: nothing but the chunk at hand is in memory, and no rank is needed to hold it.

What is written is what `torch.distributed.checkpoint` and Megatron's `dist_checkpointing.load` read: see `checkpoint.torch_dist`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
from checkpoint.torch_archive import ALIGNMENT, archive
from resharding.boxes import Box, shape_of
from resharding.layout import LocalTensor

FILE_BYTES = 5 << 30
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

    `crcs` are the CRC-32 checksums and sizes of the finished files of this rank.
    """

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self.directory, self.file_bytes = directory, file_bytes
        self.crcs: dict[str, tuple[int, int]] = {}
        self._written: list[_Written] = []
        self._file: BinaryIO | None = None
        self._name, self._crc, self._position = "", 0, 0

    def write(self, key: str, box: Box, values: Tensor) -> None:
        """Write the chunk `box` of `key`. `values` [shape of box], contiguous, in the dtype that is stored."""
        data = memoryview(values.reshape(-1).view(torch.uint8).numpy()) if values.numel() else memoryview(b"")
        head, tail = archive(values.dtype, shape_of(box), zlib.crc32(data))
        self._begin(len(head) + len(data) + len(tail))
        offset = self._position
        for part in (head, data, tail):
            self._append(part)
        self._written.append(_Written(key, box, self._name, offset, self._position - offset))
        self._append(b"\0" * (-self._position % ALIGNMENT))

    def _append(self, part: bytes | memoryview) -> None:
        assert self._file is not None
        self._file.write(part)
        self._crc = zlib.crc32(part, self._crc)
        self._position += len(part)

    def _begin(self, length: int) -> None:
        if self._file is not None and self._position and self._position + length > self.file_bytes:
            self._end()
        if self._file is None:
            self._name, self._crc, self._position = f"__{rank()}_{len(self.crcs)}.distcp", 0, 0
            self._file = open(self.directory / self._name, "wb")

    def _end(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.crcs[self._name] = (self._position, self._crc)
            self._file = None

    def abandon(self) -> None:
        """Close what is open; what was written is not a checkpoint."""
        if self._file is not None:
            self._file.close()
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
        torch.save(None, out)
        self._begin(len(out.getvalue()))
        offset = self._position
        self._append(out.getvalue())
        self._written.append(_Written("", (), self._name, offset, self._position - offset))


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
