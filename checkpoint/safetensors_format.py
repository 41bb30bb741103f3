"""The safetensors file format: a header of names, dtypes, shapes and places, then the bytes (github.com/huggingface/safetensors).

    8 bytes: length N of the header, little endian;  N bytes: JSON;  then the data, without holes

Read and written here, because the header of a file can be written before any tensor is there, and because a memory map gives
slices of slices without a copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel.errors import UserError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
          "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
CODES = {dtype: code for code, dtype in DTYPES.items()}
HEADER_LIMIT = 100_000_000  # bytes, as in the reference reader


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: dtype code, shape, and its bytes [start, stop) from the beginning of the file."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None for a dtype that torch or this reader does not know."""
        return DTYPES.get(self.code)


def read_header(path: Path) -> dict[str, Entry]:
    """All tensors of a file. Raises UserError where it is no safetensors file, damaged or shorter than its header says."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = {name: Entry(e["dtype"], tuple(e["shape"]), *(8 + length + int(n) for n in e["data_offsets"])) for name, e in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}; download it again") from None
    end = max((e.stop for e in entries.values()), default=8 + length)
    if end > size:
        raise UserError(f"{path} is cut short: it has {size} bytes, its header describes {end}; download it again")
    for name, e in entries.items():
        if e.dtype is not None and e.stop - e.start != math.prod(e.shape) * e.dtype.itemsize:
            raise UserError(f"{path} cannot be read as safetensors: {name} {e.code} {e.shape} in {e.stop - e.start} bytes; download it again")
    return entries


def make_header(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[bytes, dict[str, Entry]]:
    """The first bytes of a file that holds `tensors`, and where each goes.

    Wide dtypes come first, as in the reference writer, so that every tensor is aligned to its own width.
    """
    places: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
    position = 0
    for name, shape, dtype in sorted(tensors, key=lambda t: -t[2].itemsize):
        stop = position + math.prod(shape) * dtype.itemsize
        places[name] = (dtype, shape, position, stop)
        position = stop
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    described.update((name, {"dtype": CODES[d], "shape": list(s), "data_offsets": [a, b]}) for name, (d, s, a, b) in places.items())
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: Entry(CODES[d], s, begin + a, begin + b) for n, (d, s, a, b) in places.items()}


def file_size(head: bytes, entries: Mapping[str, Entry]) -> int:
    return max((e.stop for e in entries.values()), default=len(head))
