"""Files mapped into memory: tensors over them cost nothing until they are touched, and long runs of them are better read than touched."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right, insort
from pathlib import Path

import torch
from torch import Tensor

READ_BYTES = 1 << 16  # shorter runs are copied from the map: a system call costs more than their page faults


class MappedFiles:
    """The files of a directory, each opened and mapped when it is first asked for. Never write to what it gives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, tuple[int, mmap.mmap, Tensor]] = {}
        self._by_address: list[tuple[int, str]] = []

    def bytes(self, file: str) -> Tensor:
        """The content of a file, [bytes] uint8."""
        if file not in self._open:
            handle = os.open(self.directory / file, os.O_RDONLY | os.O_CLOEXEC)
            mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
            self._open[file] = handle, mapped, torch.frombuffer(mapped, dtype=torch.uint8)
            insort(self._by_address, (self._open[file][2].data_ptr(), file))
        return self._open[file][2]

    def forget(self, file: str, start: int, stop: int) -> None:
        """Give the pages of a region back. Tensors over it stay valid: the pages are mapped again when they are touched."""
        if file in self._open and stop > start:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._open[file][1].madvise(mmap.MADV_DONTNEED, first, stop - first)

    def read(self, values: Tensor, target: Tensor) -> bool:
        """Fill `target` from the file where `values`, a tensor over it, lies; False where that is not possible or not worth while.

        Both must be contiguous and of one dtype. A read of a file in the page cache is three times as fast as the page faults
        of a copy from its map.
        """
        if values.dtype != target.dtype or values.nbytes < READ_BYTES or not (values.is_contiguous() and target.is_contiguous()):
            return False
        i = bisect_right(self._by_address, values.data_ptr(), key=lambda entry: entry[0]) - 1
        if i < 0:
            return False
        handle, mapped, content = self._open[self._by_address[i][1]]
        position = values.data_ptr() - content.data_ptr()
        if position + values.nbytes > len(mapped):
            return False
        view = memoryview(target.view(-1).view(torch.uint8).numpy())
        while len(view):
            done = os.preadv(handle, [view], position)
            if not done:
                raise OSError(f"{self.directory / self._by_address[i][1]} became shorter while it was read")
            view, position = view[done:], position + done
        return True

    def close(self) -> None:
        for handle, _, _ in self._open.values():
            os.close(handle)
        self._open.clear()
        self._by_address.clear()
