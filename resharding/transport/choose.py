"""Which transport serves which pair of ranks: in place, through memory on one host, point to point between hosts."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import ModuleType

import torch
import torch.distributed as dist

from parallel.errors import UserError
from resharding.plan import Plan
from resharding.transform import CAST, Transform
from resharding.transport import cuda_ipc, in_place, point_to_point, shared_memory
from resharding.transport.in_place import MoveReport
from resharding.transport.messages import BUCKET
from resharding.transport.peers import Peers, meet

TRANSPORTS: dict[str, ModuleType] = {"point_to_point": point_to_point, "shared_memory": shared_memory, "cuda_ipc": cuda_ipc, "in_place": in_place}
Pair = tuple[int, int]


def execute(plan: Plan, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], rank: int = 0,
            group: dist.ProcessGroup | None = None, bucket_bytes: int = BUCKET, transform: Transform = CAST,
            transport: str = "auto") -> MoveReport:
    """Run the plan on `rank`; every rank of `group` must call this, with a plan of its own copies or of all ranks'.

    Copies within the rank are made in place; between ranks of one host the receiver takes them out of the sender's memory, CPU or
    GPU; all others go point to point. `transport` names one for all copies between ranks instead. Extra memory is two buckets of
    `bucket_bytes`. A rank that fails, or loses a peer, keeps the protocol with the others and raises the first error at the end.
    """
    if transport not in ("auto", *TRANSPORTS):
        raise UserError(f"transport is {transport!r}; allowed: auto, {', '.join(TRANSPORTS)}")
    started = time.perf_counter()
    moved: Counter[str] = Counter()
    failures: list[Exception] = []
    served = _pairs(plan, source, destination, rank, group, transport)
    for name, module in TRANSPORTS.items():  # the same order on all ranks: none is in a later transport than one it waits for
        if name in served:
            try:
                moved.update(module.execute(plan, source, destination, rank, group, bucket_bytes, transform, served[name]).by_transport)
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]
    moved = Counter({name: n for name, n in moved.items() if n})
    return MoveReport(sum(moved.values()), time.perf_counter() - started, dict(moved))


def _pairs(plan: Plan, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], rank: int,
           group: dist.ProcessGroup | None, transport: str) -> dict[str, frozenset[Pair]]:
    """The pairs of ranks that each transport serves, of those that `rank` is part of. Collective at the first use of a plan."""
    key = ("pairs", rank, transport)
    if key not in plan._cache:
        served: dict[str, set[Pair]] = defaultdict(set)
        served["in_place"] = {(rank, rank)}
        pairs = {(c.src_rank, c.dst_rank) for c in plan.copies if rank in (c.src_rank, c.dst_rank) and c.src_rank != c.dst_rank}
        alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        if transport == "auto" and alone:
            transport = "in_place"  # which refuses what would have to travel
        if transport == "point_to_point" or alone:
            served[transport] |= pairs
        else:
            peers = meet(group)  # also where the transport is given: every rank meets, whatever it has to exchange
            devices = _devices(source, destination, peers.control or group)
            for src, dst in pairs:
                served[_way(src, dst, devices, peers) if transport == "auto" else transport].add((src, dst))
        plan._cache[key] = {name: frozenset(found) for name, found in served.items() if found}
    found = plan._cache[key]
    assert isinstance(found, dict)
    return found


def _way(src: int, dst: int, devices: Mapping[int, tuple[str, str]], peers: Peers) -> str:
    kinds = devices[src][0], devices[dst][1]
    if kinds == ("cpu", "cpu") and (dst, src) in peers.maps:
        return "shared_memory"
    if kinds == ("cuda", "cuda") and (dst, src) in peers.sees:
        return "cuda_ipc"
    return "point_to_point"


def _devices(source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor],
             group: dist.ProcessGroup | None) -> dict[int, tuple[str, str]]:
    """Of every rank, the kind of device of its source and its destination tensors."""
    mine = _kind(source), _kind(destination)
    everyone: list[tuple[str, str]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return dict(zip(dist.get_process_group_ranks(group), everyone, strict=True))


def _kind(tensors: Mapping[str, torch.Tensor]) -> str:
    """The kind of device of the first tensor. What cannot be read is found when it is moved, where the protocol can go on."""
    try:
        return next((t.device.type for t in tensors.values()), "cpu")
    except Exception:
        return "unknown"
