"""Who can reach whose memory: ranks of one host try it once, and all learn the outcome."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from resharding.hosts import hosts
from resharding.transport import process_memory
from resharding.transport.buckets import SharedBytes, open_bytes

_NONCE = 32


@dataclass(frozen=True)
class Peers:
    """Pairs are (reader, owner) in global ranks. `control`: a group like the one that met, for messages of host memory; None: that one."""

    maps: frozenset[tuple[int, int]]  # the reader can map the owner's buckets
    reads: frozenset[tuple[int, int]]  # the reader can read all of the owner's memory
    sees: frozenset[tuple[int, int]]  # the reader sees the owner's GPU
    control: dist.ProcessGroup | None


_known: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()


def meet(group: dist.ProcessGroup | None = None) -> Peers:
    """Collective over `group`, at its first use; remembered for as long as the group lives."""
    key = group if group is not None else dist.group.WORLD
    assert key is not None
    if key not in _known:
        _known[key] = _meet(key)
    return _known[key]


def _meet(group: dist.ProcessGroup) -> Peers:
    own = None
    if "gloo" not in dist.get_backend_config(group):
        own = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    control, rank = own or group, dist.get_rank()
    secret = secrets.token_bytes(_NONCE)
    memory = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
    shared = SharedBytes(_NONCE) if hasattr(os, "memfd_create") else None
    if shared is not None:
        shared.tensor.copy_(memory)
    card = {"pid": os.getpid(), "secret": secret, "address": memory.data_ptr(), "path": shared and shared.path, "gpus": _gpus()}
    with process_memory.readable():
        host, cards = hosts(control), _gather(card, control)
        neighbours = [r for r in cards if r != rank and host[r] == host[rank]]
        tried = {"maps": {r for r in neighbours if _maps(cards[r])}, "reads": {r for r in neighbours if _reads(cards[r])},
                 "sees": {r for r in neighbours if set(cards[r]["gpus"][:1]) & set(card["gpus"])}}
        found = _gather(tried, control)
    return Peers(*(frozenset((r, o) for r, mine in found.items() for o in mine[what]) for what in ("maps", "reads", "sees")), own)


def _gather(mine: Any, group: dist.ProcessGroup) -> dict[int, Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return dict(zip(dist.get_process_group_ranks(group), everyone, strict=True))


def _maps(card: dict[str, Any]) -> bool:
    try:
        return card["path"] is not None and bytes(open_bytes(card["path"], _NONCE).tolist()) == card["secret"]
    except (OSError, ValueError):
        return False


def _reads(card: dict[str, Any]) -> bool:
    found = torch.zeros(_NONCE, dtype=torch.uint8)
    try:
        process_memory.read(card["pid"], (_NONCE,), 1, process_memory.Part(found.data_ptr(), (1,)), process_memory.Part(card["address"], (1,)))
    except (OSError, AttributeError):
        return False
    return bytes(found.tolist()) == card["secret"]


def _gpus() -> list[str]:
    """The GPUs that this process sees, its own first."""
    if not torch.cuda.is_available():
        return []
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    own = torch.cuda.current_device()
    return [names[own], *names[:own], *names[own + 1:]]
