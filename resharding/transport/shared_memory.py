"""Copies between CPU ranks of one host, without a message: the receiver reads the sender's memory (process_vm_readv).

Sender's parts that must be cast or computed, or lie in rows too short for the kernel to be quick, go through buckets that the receiver
maps (memfd). Where the kernel does not let one process read another (see `process_memory`) everything does. Both end with the processes:
nothing stays in /dev/shm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from resharding.boxes import at, slices
from resharding.errors import WeightsError
from resharding.plan import Copy, Plan
from resharding.transform import CAST, Transform
from resharding.transport import process_memory, same_host
from resharding.transport.buckets import Buckets, open_bytes
from resharding.transport.in_place import MoveReport
from resharding.transport.memory import Offer, Place
from resharding.transport.messages import BUCKET, Pairs, split
from resharding.transport.peers import Peers, meet
from resharding.transport.process_memory import Part

FEW = 1 << 16  # bytes: a copy so small is read directly, whatever its rows
SOURCE_ROW, ROW = 1 << 13, 1 << 11  # bytes: shorter rows go through a bucket, the sender's or the receiver's
CALL = 64 << 20  # bytes that are read in one call


def execute(plan: Plan, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], rank: int = 0,
            group: dist.ProcessGroup | None = None, bucket_bytes: int = BUCKET, transform: Transform = CAST,
            pairs: Pairs | None = None) -> MoveReport:
    """Run the plan on `rank`; at its first use on a group every rank of it must call this (see `peers.meet`).

    `pairs`: only these (source, destination) ranks. Tensors are on the CPU. Casts happen at the source. A rank that fails keeps the
    protocol and raises at the end. Raises WeightsError where a pair does not share memory.
    """
    memory = SharedMemory(meet(group))
    for src, dst in {(c.src_rank, c.dst_rank) for c in plan.copies} if pairs is None else pairs:
        if src != dst and rank in (src, dst) and (dst, src) not in memory.peers.maps:
            raise WeightsError(f"ranks {src} and {dst} share no memory (another host, container or user); use the point-to-point transport")
    return same_host.run(memory, memory.peers.control or group, plan, source, destination, rank, bucket_bytes, transform, pairs)


class SharedMemory:
    """See `memory.Memory`. A storage is shared as (process, address)."""

    name, device, lasting = "shared_memory", torch.device("cpu"), True

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def lent(self) -> AbstractContextManager[None]:
        return process_memory.readable()

    def offers(self, copy: Copy, part: torch.Tensor, reader: int) -> bool:
        if (reader, copy.src_rank) not in self.peers.reads or part.device.type != "cpu":
            return False
        return copy.nbytes <= FEW or part.is_contiguous() or _run(part) >= SOURCE_ROW

    def share(self, storage: torch.UntypedStorage) -> Any:
        return os.getpid(), storage.data_ptr()

    def share_buckets(self, buckets: Buckets) -> Any:
        assert buckets.memory is not None
        return buckets.memory.path, buckets.size

    def open(self, offer: Offer, buckets: Buckets, slot: int) -> "_Reader":
        return _Reader(offer, buckets, slot)

    def settle(self) -> None:
        pass


class _Reader:
    def __init__(self, offer: Offer, staging: Buckets, slot: int) -> None:
        self.storages, self.staging, self.slot = offer.storages, staging, slot
        if offer.buckets is not None:
            path, self.size = offer.buckets
            self.buckets = open_bytes(path, 2 * self.size)

    def bucket(self, number: int, nbytes: int) -> torch.Tensor:
        return self.buckets[number * self.size:number * self.size + nbytes]

    def read(self, copies: Sequence[tuple[Copy, Place]], destination: Mapping[str, torch.Tensor]) -> None:
        for copy, place in copies:
            target = copy.dst_view.of(destination[copy.dst_tensor])[slices(copy.dst_box)]
            if target.dtype != copy.dtype or target.device.type != "cpu" or tuple(target.shape) != place.shape:
                raise WeightsError(f"{copy.canonical} arrives as {place.shape} {copy.dtype} on the CPU, but {copy.dst_tensor} has "
                                   f"{tuple(target.shape)} {target.dtype} on {target.device} for it")
            short = copy.nbytes > FEW and _run(target) < ROW
            if short:
                self.staging.reserve(self.slot)
            for slab in split(copy, self.slot if short else CALL):
                box = at([low - start for (low, _), (start, _) in zip(slab.dst_box, copy.dst_box)], slab.dst_box)
                self._read(target[slices(box)], place, [low for low, _ in box], short)

    def _read(self, target: torch.Tensor, place: Place, corner: Sequence[int], short: bool) -> None:
        """Copy the part of `place` at `corner` to the target, through a bucket where the target's rows are short."""
        process, address = self.storages[place.storage]
        remote = Part(address + place.offset + sum(c * s for c, s in zip(corner, place.strides)), place.strides)
        size = target.element_size()
        into = self.staging.part(0, target.nbytes).view(target.dtype).view(target.shape) if short else target
        process_memory.read(process, target.shape, size, Part(into.data_ptr(), tuple(s * size for s in into.stride())), remote)
        if short:
            target.copy_(into)


def _run(part: torch.Tensor) -> int:
    size = part.element_size()
    return process_memory.run_bytes(part.shape, [s * size for s in part.stride()], size)
