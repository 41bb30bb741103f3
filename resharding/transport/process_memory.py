"""Reading the memory of another process of this host: Linux's process_vm_readv, one copy and no help from the other side.

The kernel allows it between processes of one user; with Yama (`kernel.yama.ptrace_scope` 1, the default of Ubuntu) only after the
owner has said so, which `readable` does for as long as it is entered. Containers may forbid it: `resharding.transport.peers` tries.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
PARTS = 1024  # IOV_MAX: parts of memory in one call
if hasattr(_LIBC, "process_vm_readv"):
    _LIBC.process_vm_readv.restype = ctypes.c_ssize_t
    _LIBC.process_vm_readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]


@contextmanager
def readable() -> Iterator[None]:
    """Let other processes of this user read this one's memory."""
    prctl = getattr(_LIBC, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # fails where there is no Yama: nothing to allow then
    try:
        yield
    finally:
        if prctl is not None:
            prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


class Part(NamedTuple):
    """Strided memory: `strides` in bytes."""

    address: int
    strides: tuple[int, ...]


def read(pid: int, shape: Sequence[int], itemsize: int, local: Part, remote: Part) -> None:
    """Copy a tensor of `shape` (up to 2 GB) from process `pid`.

    Raises OSError where the process is gone, may not be read, or an address is not its own.
    """
    nbytes = math.prod(shape) * itemsize
    run = min(run_bytes(shape, part.strides, itemsize) for part in (local, remote))  # divides both
    here, there = _Entries(shape, itemsize, local, run), _Entries(shape, itemsize, remote, run)
    for first in range(0, nbytes // run if nbytes else 0, PARTS):
        count = min(PARTS, nbytes // run - first)
        done = _LIBC.process_vm_readv(pid, *here.of(first, count), *there.of(first, count), 0)
        if done != count * run:
            number = ctypes.get_errno() if done < 0 else errno.EFAULT  # it stopped where memory is not mapped
            raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")


def run_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes that lie side by side before the first jump. `strides` in bytes."""
    run = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != run:
            break
        run *= size
    return run


class _Entries:
    """The (address, bytes) pairs of a tensor cut into runs of `run` bytes."""

    def __init__(self, shape: Sequence[int], itemsize: int, part: Part, run: int) -> None:
        self.address, self.run, self.table = part.address, run, None
        self._one = (ctypes.c_uint64 * 2)()
        if run_bytes(shape, part.strides, itemsize) < math.prod(shape) * itemsize:
            starts = torch.full((1,), part.address, dtype=torch.int64)
            covered, inner = itemsize, len(shape)
            while covered < run:
                inner -= 1
                covered *= shape[inner]
            for size, stride in zip(shape[:inner], part.strides[:inner], strict=True):
                starts = (starts[:, None] + torch.arange(size) * stride).reshape(-1)
            self.table = torch.stack([starts, torch.full_like(starts, run)], 1)

    def of(self, first: int, count: int) -> tuple[int, int]:
        """Address and length of the pairs of runs [first, first + count); a contiguous tensor has one for all of them."""
        if self.table is not None:
            return self.table.data_ptr() + 16 * first, count
        self._one[:] = (self.address + first * self.run, count * self.run)
        return ctypes.addressof(self._one), 1
