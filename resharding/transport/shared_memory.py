"""Copies between CPU ranks of one host, without a message: the receiver reads the sender's memory (process_vm_readv).

Sender's parts that must be cast or computed, or lie in rows too short for the kernel to be quick, go through buckets that the receiver
maps (memfd). Where the kernel does not let one process read another (see `process_memory`) everything does. Both end with the processes:
nothing stays in /dev/shm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from resharding.boxes import slices
from resharding.errors import WeightsError
from resharding.plan import Copy, Plan
from resharding.transform import CAST, Transform
from resharding.transport import process_memory, same_host
from resharding.transport.buckets import Buckets, open_bytes
from resharding.transport.in_place import MoveReport, Strided, geometry, strided
from resharding.transport.memory import Offer, Place
from resharding.transport.messages import BUCKET, Pairs, inside_of, split
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


class _Slab(NamedTuple):
    """What is read at once: `target` from `storage` of the peer, at `offset` with `strides` (both in bytes)."""

    target: Strided
    storage: int
    offset: int
    strides: tuple[int, ...]
    size: int  # bytes of an element
    staged: bool  # through a bucket, because the target's rows are short


class _Reader:
    def __init__(self, offer: Offer, staging: Buckets, slot: int) -> None:
        self.storages, self.staging, self.slot = offer.storages, staging, slot
        self.key: object = None
        self.slabs: list[_Slab] = []
        if offer.buckets is not None:
            path, self.size = offer.buckets
            self.buckets = open_bytes(path, 2 * self.size)

    def bucket(self, number: int, nbytes: int) -> torch.Tensor:
        return self.buckets[number * self.size:number * self.size + nbytes]

    def read(self, copies: Sequence[tuple[Copy, Place]], destination: Mapping[str, torch.Tensor]) -> None:
        key = geometry(destination, (copy.dst_tensor for copy, _ in copies))
        if key != self.key:
            self.slabs = [slab for copy, place in copies for slab in _slabs(copy, place, destination, self.slot)]
            self.slabs, self.key = _merged(self.slabs), key
        for slab in self.slabs:
            process, address = self.storages[slab.storage]
            remote, size = Part(address + slab.offset, slab.strides), slab.size
            if slab.staged:
                target = slab.target.of(destination)
                self.staging.reserve(self.slot)
                staged = self.staging.part(0, target.nbytes).view(target.dtype).view(target.shape)
                process_memory.read(process, staged.shape, size, Part(staged.data_ptr(), tuple(s * size for s in staged.stride())), remote)
                target.copy_(staged)
            else:
                local = Part(destination[slab.target.name].data_ptr() + slab.target.offset * size, tuple(s * size for s in slab.target.stride))
                process_memory.read(process, slab.target.size, size, local, remote)


def _slabs(copy: Copy, place: Place, destination: Mapping[str, torch.Tensor], slot: int) -> Iterator[_Slab]:
    whole = destination[copy.dst_tensor]
    target = copy.dst_view.of(whole)[slices(copy.dst_box)]
    if target.dtype != copy.dtype or target.device.type != "cpu" or tuple(target.shape) != place.shape:
        raise WeightsError(f"{copy.canonical} arrives as {place.shape} {copy.dtype} on the CPU, but {copy.dst_tensor} has "
                           f"{tuple(target.shape)} {target.dtype} on {target.device} for it")
    size, staged = target.element_size(), copy.nbytes > FEW and _run(target) < ROW
    for slab in split(copy, slot if staged else CALL):
        box = inside_of(slab, copy)
        part = target[slices(box)]
        flat = part.is_contiguous() and process_memory.run_bytes(part.shape, place.strides, size) == part.nbytes
        yield _Slab(strided(copy.dst_tensor, part, whole, flat), place.storage, place.offset + sum(b[0] * s for b, s in zip(box, place.strides)),
                    (size,) if flat else place.strides, size, staged)


def _merged(slabs: list[_Slab]) -> list[_Slab]:
    """Neighbours that are contiguous on both sides as one, up to what one call reads."""
    out: list[_Slab] = []
    for slab in slabs:
        last = out[-1] if out else None
        if (last is not None and last.strides == slab.strides == (slab.size,) and last.storage == slab.storage
                and last.offset + last.target.size[0] * last.size == slab.offset and last.target.name == slab.target.name
                and last.target.offset + last.target.size[0] == slab.target.offset
                and (last.target.size[0] + slab.target.size[0]) * slab.size <= CALL):
            joined = last.target._replace(size=(last.target.size[0] + slab.target.size[0],))
            out[-1] = last._replace(target=joined)
        else:
            out.append(slab)
    return out


def _run(part: torch.Tensor) -> int:
    size = part.element_size()
    return process_memory.run_bytes(part.shape, [s * size for s in part.stride()], size)
