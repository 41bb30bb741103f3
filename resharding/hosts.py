"""Which ranks share a host."""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def hosts(group: dist.ProcessGroup | None = None) -> dict[int, int]:
    """Collective: a number for the host of every rank of `group` (global ranks), equal for ranks of one host."""
    if not dist.is_initialized():
        return {0: 0}
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else ""
    mine = (dist.get_rank(), f"{socket.gethostname()} {boot}")
    everyone: list[tuple[int, str]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    numbers: dict[str, int] = {}
    return {rank: numbers.setdefault(name, len(numbers)) for rank, name in everyone}
