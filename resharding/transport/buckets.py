"""The two buffers that a rank moves messages through: all the memory that a transport takes, whatever the model's size.

On a host they lie in anonymous shared memory (memfd), which another process can map through /proc/PID/fd/FD as long as the descriptor
is open. It has no name in /dev/shm and no limit but the machine's, and is gone with the last process that maps it, also after SIGKILL.
"""

from __future__ import annotations

import mmap
import os

import torch

from resharding.plan import Plan


class SharedBytes:
    """`tensor` [nbytes] uint8, which other processes map from `path`."""

    def __init__(self, nbytes: int) -> None:
        self._fd = os.memfd_create("mcore-rl", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.tensor = map_bytes(self._fd, nbytes)

    def __del__(self) -> None:
        os.close(self._fd)


def map_bytes(fd: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def open_bytes(path: str, nbytes: int) -> torch.Tensor:
    """Map another process's SharedBytes. Raises OSError where the system does not let this process."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_bytes(fd, nbytes)
    finally:
        os.close(fd)


class Buckets:
    """Two buffers of `size` bytes each; they grow to the largest message that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.size = device, 0
        self.memory: SharedBytes | None = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, nbytes: int) -> None:
        """Make room for messages of `nbytes`. What was in the buffers is lost where they grow."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if nbytes <= self.size:
            return
        if self.device.type == "cpu" and hasattr(os, "memfd_create"):
            self.memory = SharedBytes(2 * nbytes)
            self.tensor = self.memory.tensor
        else:
            self.tensor = torch.empty(2 * nbytes, dtype=torch.uint8, device=self.device)
        self.size = nbytes

    def part(self, number: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of buffer `number` (0 or 1)."""
        return self.tensor[number * self.size:number * self.size + nbytes]


def buckets_of(plan: Plan, device: torch.device) -> Buckets:
    """The plan's buffers on a device: the transports that share its work use the same ones, one after the other."""
    found = plan._cache.setdefault(("buckets", device), Buckets(device))
    assert isinstance(found, Buckets)
    return found
