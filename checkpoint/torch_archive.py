"""One tensor as `torch.save` writes it (a zip archive of stored entries), without what torch.save costs: no second copy of a large buffer.

A chunk of a `torch_dist` checkpoint is such an archive at some place in a file. Here its bytes are found, so that they can be mapped
instead of read, and made from any contiguous memory, also a part of a memory map, of which `torch.save` would write the whole.
Format: torch/serialization.py and caffe2/serialize/inline_container.h of torch 2.13.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import torch

ALIGNMENT = 64  # bytes: where torch puts the values, from the beginning of the archive
_LOCAL, _CENTRAL, _END = "<4s5H3I2H", "<4s6H3I5H2I", "<4s4H2IH"
_END64, _LOCATOR = "<4sQ2H2I4Q", "<4sIQI"
_WIDE = 0xFFFFFFFF
_DATA = "archive/data/0"
_UTF8, _LATER = 0x800, 0x808  # flags of a member; the second: its checksum follows its content


@dataclass(frozen=True)
class Values:
    """Where the values of a contiguous tensor lie, from the beginning of the archive."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    """Stands for the storage in a pickle: torch writes it as a persistent id."""

    kind: Any
    elements: int


@dataclass(frozen=True)
class _Tensor:
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        numel = math.prod(self.shape)
        strides = [1] * len(self.shape)
        for d in range(len(self.shape) - 2, -1, -1):
            strides[d] = strides[d + 1] * max(self.shape[d + 1], 1)
        return torch._utils._rebuild_tensor_v2, (_Storage(_storage_types()[self.dtype], numel), 0, self.shape, tuple(strides), False,
                                                 collections.OrderedDict())


@lru_cache(maxsize=1)
def _storage_types() -> dict[torch.dtype, Any]:
    from torch.storage import _dtype_to_storage_type_map

    return {dtype: getattr(torch, name) for dtype, name in _dtype_to_storage_type_map().items() if hasattr(torch, name)}


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.elements) if isinstance(obj, _Storage) else None


@lru_cache(maxsize=256)  # a model repeats few shapes
def _small_members(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """The small members of the archive of a tensor, and their entries in its directory."""
    out = io.BytesIO()
    _Pickler(out, 2).dump(_Tensor(dtype, shape))
    head, central = bytearray(), bytearray()
    for name, content in (("archive/data.pkl", out.getvalue()), ("archive/byteorder", b"little"), ("archive/version", b"3\n")):
        central += _entry(name, zlib.crc32(content), len(content), len(head))
        head += _header(name, zlib.crc32(content), len(content), len(head)) + content
    return bytes(head), bytes(central)


def before_values(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What an archive holds before the values of a contiguous tensor."""
    head, _ = _small_members(dtype, shape)
    return head + _header(_DATA, 0, math.prod(shape) * dtype.itemsize, len(head), _LATER)


def after_values(dtype: torch.dtype, shape: tuple[int, ...], crc: int) -> bytes:
    """What it holds after them; `crc` is their CRC-32. It may be computed while they are written: it is needed only here."""
    head, central = _small_members(dtype, shape)
    nbytes = math.prod(shape) * dtype.itemsize
    descriptor = struct.pack("<4sI2Q" if nbytes >= _WIDE else "<4s3I", b"PK\x07\x08", crc, nbytes, nbytes)
    central += _entry(_DATA, crc, nbytes, len(head), _LATER)
    return descriptor + central + _end(4, len(central), len(before_values(dtype, shape)) + nbytes + len(descriptor))


def _header(name: str, crc: int, size: int, offset: int, flags: int = _UTF8) -> bytes:
    """A local file header, padded so that the content is aligned."""
    wide = struct.pack("<2H2Q", 1, 16, size, size) if size >= _WIDE else b""
    small = _WIDE if wide else size
    length = offset + 30 + len(name) + len(wide) + 4
    padding = -length % ALIGNMENT
    extra = wide + struct.pack("<2H", 0x4246, padding) + b"Z" * padding  # torch's own tag for padding
    return struct.pack(_LOCAL, b"PK\x03\x04", 45 if wide else 20, flags, 0, 0, 0x21, crc, small, small, len(name), len(extra)) + name.encode() + extra


def _entry(name: str, crc: int, size: int, offset: int, flags: int = _UTF8) -> bytes:
    wide = struct.pack("<2H2Q", 1, 16, size, size) if size >= _WIDE else b""
    small = _WIDE if wide else size
    return struct.pack(_CENTRAL, b"PK\x01\x02", 45, 45 if wide else 20, flags, 0, 0, 0x21, crc, small, small, len(name), len(wide), 0, 0, 0, 0,
                       offset) + name.encode() + wide


def _end(count: int, size: int, offset: int) -> bytes:
    if offset < _WIDE:
        return struct.pack(_END, b"PK\x05\x06", 0, 0, count, count, size, offset, 0)
    return (struct.pack(_END64, b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset) +
            struct.pack(_LOCATOR, b"PK\x06\x07", 0, offset + size, 1) + struct.pack(_END, b"PK\x05\x06", 0, 0, count, count, size, _WIDE, 0))


class _Found(Exception):
    """Raised where a pickle holds anything but one plain tensor."""


class _Unpickler(pickle.Unpickler):
    """Reads what `torch.save` wrote for a tensor; makes nothing and calls nothing."""

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: arguments
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, requires_grad, hooks: data
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise _Found(f"{module}.{name}")


def find_values(file: BinaryIO) -> Values | None:
    """Where the values are in an archive (seekable, and nothing but the archive); None where it holds no plain contiguous tensor.

    Raises ValueError for what is no archive of torch.save.
    """
    try:
        with zipfile.ZipFile(file) as found:  # type: ignore[arg-type]
            entries = {info.filename.split("/", 1)[-1]: info for info in found.infolist()}
            content = found.read(entries["data.pkl"])
        (_, kind, key, _, _), offset, shape, strides, *_ = _Unpickler(io.BytesIO(content)).load()
        info = entries[f"data/{key}"]
        dtype = next((d for d, k in _storage_types().items() if k.__name__ == kind), None)
        byteorder = b"little" if "byteorder" not in entries else None
        if byteorder is None:
            with zipfile.ZipFile(file) as found:  # type: ignore[arg-type]
                byteorder = found.read(entries["byteorder"])
        if dtype is None or byteorder != b"little" or info.compress_type != zipfile.ZIP_STORED or not _is_contiguous(shape, strides):
            return None
        file.seek(info.header_offset + 26)
        name_length, extra_length = struct.unpack("<2H", file.read(4))
        start = info.header_offset + 30 + name_length + extra_length + offset * dtype.itemsize
        return Values(start, dtype, tuple(shape)) if info.file_size >= (offset + math.prod(shape)) * dtype.itemsize else None
    except _Found:
        return None
    except (zipfile.BadZipFile, KeyError, TypeError, struct.error, pickle.UnpicklingError, EOFError, IndexError, NotImplementedError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size > 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True
