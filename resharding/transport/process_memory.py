"""Reading the memory of another process of this host: Linux's process_vm_readv, one copy and no help from the other side.

The kernel allows it between processes of one user; with Yama (`kernel.yama.ptrace_scope` 1, the default of Ubuntu) only after the
owner has said so, which `readable` does for as long as it is entered. Containers may forbid it: `resharding.transport.peers` tries.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
PARTS = 1024  # IOV_MAX: parts of memory in one call
CALL_BYTES = 64 << 20  # bytes in one call
_INT64 = torch.int64


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


class Call(NamedTuple):
    """One system call: (address, bytes) pairs [n, 2] of this process and of the other, of `nbytes` each in all."""

    local: torch.Tensor
    remote: torch.Tensor
    nbytes: int


def read(pid: int, calls: Sequence[Call]) -> None:
    """Copy from process `pid`. Raises OSError where it is gone, may not be read, or an address is not its own."""
    for local, remote, nbytes in calls:
        done = _LIBC.process_vm_readv(pid, ctypes.c_void_p(local.data_ptr()), ctypes.c_ulong(len(local)),
                                      ctypes.c_void_p(remote.data_ptr()), ctypes.c_ulong(len(remote)), ctypes.c_ulong(0))
        if done != nbytes:
            number = ctypes.get_errno() if done < 0 else 14  # EFAULT: the transfer stopped where memory is not mapped
            raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")


if hasattr(_LIBC, "process_vm_readv"):
    _LIBC.process_vm_readv.restype = ctypes.c_ssize_t


def run_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes that lie side by side before the first jump. `strides` in bytes."""
    run = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != run:
            break
        run *= size
    return run


def calls_for(parts: Sequence[tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...], int]]) -> list[Call]:
    """The calls that copy strided parts: (shape, local address, local strides, remote address, remote strides, itemsize) each."""
    local, remote, sizes = [], [], []
    for shape, here, here_strides, there, there_strides, itemsize in parts:
        run = min(run_bytes(shape, here_strides, itemsize), run_bytes(shape, there_strides, itemsize))
        local.append(_starts(here, shape, here_strides, itemsize, run))
        remote.append(_starts(there, shape, there_strides, itemsize, run))
        sizes.append(torch.full_like(local[-1], min(run, CALL_BYTES)))
        if run > CALL_BYTES:
            local[-1], sizes[-1] = _chopped(local[-1], run)
            remote[-1], _ = _chopped(remote[-1], run)
    return _batched(torch.cat(local), torch.cat(remote), torch.cat(sizes)) if local else []


def _starts(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, run: int) -> torch.Tensor:
    """Addresses of the runs of `run` bytes, in row-major order."""
    dims = list(zip(shape, strides, strict=True))
    covered = itemsize
    while covered < run:
        covered *= dims.pop()[0]
    out = torch.full((1,), address, dtype=_INT64)
    for size, stride in dims:
        out = (out[:, None] + torch.arange(size, dtype=_INT64) * stride).reshape(-1)
    return out


def _chopped(starts: torch.Tensor, run: int) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.arange(0, run, CALL_BYTES, dtype=_INT64)
    sizes = torch.clamp(run - offsets, max=CALL_BYTES)
    return (starts[:, None] + offsets).reshape(-1), sizes.repeat(len(starts))


def _batched(local: torch.Tensor, remote: torch.Tensor, sizes: torch.Tensor) -> list[Call]:
    ends = sizes.cumsum(0)
    calls, first, before = [], 0, 0
    while first < len(sizes):
        last = int(torch.searchsorted(ends, before + CALL_BYTES, right=True))
        last = max(first + 1, min(last, first + PARTS))
        nbytes = int(ends[last - 1]) - before
        calls.append(Call(_merged(local[first:last], sizes[first:last]), _merged(remote[first:last], sizes[first:last]), nbytes))
        first, before = last, before + nbytes
    return calls


def _merged(starts: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """(address, bytes) [n, 2] with neighbours joined."""
    new = torch.ones(len(starts), dtype=torch.bool)
    new[1:] = starts[1:] != starts[:-1] + sizes[:-1]
    number = new.cumsum(0) - 1
    return torch.stack([starts[new], torch.zeros(int(number[-1]) + 1, dtype=_INT64).index_add_(0, number, sizes)], 1).contiguous()
