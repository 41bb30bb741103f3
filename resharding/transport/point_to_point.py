"""Copies between ranks with isend/irecv over torch.distributed (gloo or NCCL), in rounds of bounded size.

All ranks derive the same rounds from the plan. In a round there is at most one message from one rank to another; a rank
posts all its sends and receives of the round before it waits for any. So a rank in round k waits only for ranks that are
in a round before k or in k itself, and the ranks in the earliest round can always finish it: no deadlock.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from resharding.boxes import Box, shape_of, slices, volume
from resharding.plan import Copy, Plan
from resharding.transport.in_place import MoveReport, copy_own

ALIGNMENT = 16  # bytes between copies in a message, so that each can be viewed in its own dtype


@dataclass(frozen=True)
class _Round:
    """What one rank exchanges in one round: copies by peer, in the order both sides pack them."""

    outgoing: dict[int, list[Copy]]
    incoming: dict[int, list[Copy]]


def execute(plan: Plan, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], rank: int,
            group: dist.ProcessGroup | None = None, bucket_bytes: int = 64 << 20) -> MoveReport:
    """Run the plan on `rank`; every rank that the plan names must call this.

    A rank sends and receives at most about `bucket_bytes` a round. Values are cast to the destination dtype before they
    are sent. Where this rank cannot read or write one of its tensors it still keeps the protocol, so that its peers do
    not wait for ever, and raises the first error at the end: agree on success afterwards (`resharding.agreement`).
    """
    started = time.perf_counter()
    failures: list[Exception] = []
    moved = 0
    try:
        moved = copy_own(plan, source, destination, rank).bytes
    except Exception as error:
        failures.append(error)
    device = _message_device(group) if plan.bytes_moved else torch.device("cpu")
    for exchange in _rounds(plan, rank, bucket_bytes):
        moved += _exchange(exchange, source, destination, device, group, failures)
    if failures:
        raise failures[0]
    return MoveReport(moved, time.perf_counter() - started)


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where messages must live: NCCL sends from its GPU, gloo from host memory, wherever the tensors are."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")


@torch.no_grad()
def _exchange(exchange: _Round, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], device: torch.device,
              group: dist.ProcessGroup | None, failures: list[Exception]) -> int:
    buffers, operations = {}, []
    for peer, copies in exchange.incoming.items():
        buffers[peer] = torch.empty(_message_bytes(copies), dtype=torch.uint8, device=device)
        operations.append(dist.P2POp(dist.irecv, buffers[peer], peer, group))
    for peer, copies in exchange.outgoing.items():
        message = torch.zeros(_message_bytes(copies), dtype=torch.uint8, device=device)
        try:
            for copy, view in _views(copies, message):
                view.copy_(copy.src_view.of(source[copy.src_tensor])[slices(copy.src_box)])
        except Exception as error:
            failures.append(error)
        operations.append(dist.P2POp(dist.isend, message, peer, group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    moved = 0
    for peer, copies in exchange.incoming.items():
        try:
            for copy, view in _views(copies, buffers[peer]):
                copy.dst_view.of(destination[copy.dst_tensor])[slices(copy.dst_box)].copy_(view)
                moved += copy.nbytes
        except Exception as error:
            failures.append(error)
    return moved


def _aligned(copy: Copy) -> int:
    return -(-copy.nbytes // ALIGNMENT) * ALIGNMENT


def _message_bytes(copies: list[Copy]) -> int:
    return sum(map(_aligned, copies))


def _views(copies: list[Copy], message: torch.Tensor) -> list[tuple[Copy, torch.Tensor]]:
    """Each copy with its part of the message, in its dtype and shape."""
    out, position = [], 0
    for copy in copies:
        part = message[position:position + copy.nbytes].view(copy.dtype)
        out.append((copy, part.view(shape_of(copy.dst_box))))
        position += _aligned(copy)
    return out


@lru_cache(maxsize=16)
def _rounds(plan: Plan, rank: int, bucket_bytes: int) -> list[_Round]:
    """The rounds in which `rank` takes part. A round ends when a copy would fill some rank's bucket past its size."""
    rounds: list[_Round] = []
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    outgoing: dict[int, list[Copy]] = defaultdict(list)
    incoming: dict[int, list[Copy]] = defaultdict(list)

    def close() -> None:
        if outgoing or incoming:
            rounds.append(_Round(dict(outgoing), dict(incoming)))
        for state in (sent, received, outgoing, incoming):
            state.clear()

    for whole_copy in plan.copies:
        if whole_copy.src_rank == whole_copy.dst_rank:
            continue
        for copy in _split(whole_copy, bucket_bytes):
            size = _aligned(copy)
            if max(sent[copy.src_rank], received[copy.dst_rank]) + size > bucket_bytes and (sent or received):
                close()
            sent[copy.src_rank] += size
            received[copy.dst_rank] += size
            if copy.src_rank == rank:
                outgoing[copy.dst_rank].append(copy)
            if copy.dst_rank == rank:
                incoming[copy.src_rank].append(copy)
    close()
    return rounds


def _split(copy: Copy, limit: int) -> list[Copy]:
    """The copy in slabs of rows of at most `limit` bytes each (one row at least)."""
    if copy.nbytes <= limit or not copy.dst_box:
        return [copy]
    (low, high), (src_low, _) = copy.dst_box[0], copy.src_box[0]
    row = volume(copy.dst_box[1:]) * copy.dtype.itemsize
    step = max(1, limit // row)

    def rows(box: Box, start: int, count: int) -> Box:
        return ((start, start + count), *box[1:])

    return [copy._replace(src_box=rows(copy.src_box, src_low + i, min(step, high - low - i)),
                          dst_box=rows(copy.dst_box, low + i, min(step, high - low - i)),
                          region=rows(copy.region, copy.region[0][0] + i, min(step, high - low - i))) for i in range(0, high - low, step)]
