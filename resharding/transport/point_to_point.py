"""Copies between ranks with isend/irecv over torch.distributed (gloo or NCCL), double-buffered in two buckets.

Each rank goes through its messages in rising order of their keys with at most two of them open, so that one is on the wire while the
next is packed or the last unpacked. `messages_of` says why that cannot deadlock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from resharding.boxes import slices
from resharding.plan import Copy, Plan
from resharding.transform import CAST, Transform
from resharding.transport.buckets import Buckets, buckets_of
from resharding.transport.in_place import MoveReport, copy_own, part_in_place
from resharding.transport.messages import ALONE, BUCKET, Message, Pairs, fill, messages_of


def execute(plan: Plan, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], rank: int = 0,
            group: dist.ProcessGroup | None = None, bucket_bytes: int = BUCKET, transform: Transform = CAST,
            pairs: Pairs | None = None) -> MoveReport:
    """Run the plan on `rank`; every rank that it exchanges with must call this. `pairs`: only these (source, destination) ranks.

    A rank has at most two messages of at most `bucket_bytes` open. Values are cast to the destination dtype before they are sent.
    Where this rank cannot read or write one of its tensors, or loses a peer, it still keeps the protocol with the others, so that they
    do not wait for ever, and raises the first error at the end: agree on success afterwards (`resharding.agreement`).
    """
    started = time.perf_counter()
    failures: list[Exception] = []
    own = 0
    if pairs is None or (rank, rank) in pairs:
        try:
            own = copy_own(plan, source, destination, rank, transform).bytes
        except Exception as error:
            failures.append(error)
    messages = _messages(plan, rank, bucket_bytes, pairs)
    moved = _run(plan, messages, source, destination, rank, group, transform, failures) if messages else 0
    if failures:
        raise failures[0]
    return MoveReport(own + moved, time.perf_counter() - started, {"in_place": own, "point_to_point": moved})


def _messages(plan: Plan, rank: int, bucket_bytes: int, pairs: Pairs | None) -> list[Message]:
    key = ("point_to_point", rank, bucket_bytes, pairs if pairs is None else frozenset(pairs))
    if key not in plan._cache:
        plan._cache[key] = messages_of([c for c in plan.copies if pairs is None or (c.src_rank, c.dst_rank) in pairs], rank, bucket_bytes)
    found = plan._cache[key]
    assert isinstance(found, list)
    return found


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where messages must live: NCCL sends from its GPU, gloo from host memory, wherever the tensors are."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend_config(group) else torch.device("cpu")


@dataclass
class _Open:
    """A message under way: its bytes, which are a bucket's or (None) the tensor's own."""

    message: Message
    work: dist.Work | None
    bucket: int | None
    data: torch.Tensor


@dataclass
class _Line:
    """This rank's side of the exchange."""

    source: Mapping[str, torch.Tensor]
    destination: Mapping[str, torch.Tensor]
    rank: int
    group: dist.ProcessGroup | None
    transform: Transform
    buckets: Buckets
    failures: list[Exception]
    lost: set[int] = field(default_factory=set)  # peers whose connection broke


@torch.no_grad()
def _run(plan: Plan, messages: list[Message], source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor], rank: int,
         group: dist.ProcessGroup | None, transform: Transform, failures: list[Exception]) -> int:
    buckets = buckets_of(plan, message_device(group))
    buckets.reserve(max(m.nbytes for m in messages))
    line = _Line(source, destination, rank, group, transform, buckets, failures)
    opened: deque[_Open] = deque()
    free, moved = [0, 1], 0
    for message in messages:
        if len(opened) == 2:
            moved += _close(line, opened.popleft(), free)
        opened.append(_start(line, message, free))
    while opened:
        moved += _close(line, opened.popleft(), free)
    return moved


def _start(line: _Line, message: Message, free: list[int]) -> _Open:
    outgoing = message.src == line.rank
    data, bucket = _outgoing(line, message, free) if outgoing else _incoming(line, message, free)
    peer, begin = (message.dst, dist.isend) if outgoing else (message.src, dist.irecv)
    work = None
    if peer not in line.lost:
        try:
            work = begin(data, peer, group=line.group)
        except Exception as error:
            _lose(line, peer, error)
    return _Open(message, work, bucket, data)


def _outgoing(line: _Line, message: Message, free: list[int]) -> tuple[torch.Tensor, int | None]:
    """The bytes to send: a large contiguous part of a tensor as it is, anything else packed."""
    try:
        if len(message.copies) == 1 and message.nbytes >= ALONE:
            copy = message.copies[0]
            part = part_in_place(copy, line.source, line.transform)
            if part is not None and part.dtype == copy.dtype and part.is_contiguous() and part.device == line.buckets.device:
                return _bytes(part), None
    except Exception as error:
        line.failures.append(error)
    data = line.buckets.part(free[0], message.nbytes)
    try:
        for copy, view in message.views(data):
            fill(view, copy, line.source, line.transform)
    except Exception as error:
        line.failures.append(error)
    return data, free.pop(0)


def _incoming(line: _Line, message: Message, free: list[int]) -> tuple[torch.Tensor, int | None]:
    """Where to receive: in place where the copy is large and contiguous there."""
    if len(message.copies) == 1 and message.nbytes >= ALONE:
        try:
            target = _target(line, message.copies[0])
            if target.dtype == message.copies[0].dtype and target.is_contiguous() and target.device == line.buckets.device:
                return _bytes(target), None
        except Exception:  # found again, and kept, when the message is unpacked
            pass
    return line.buckets.part(free[0], message.nbytes), free.pop(0)


def _close(line: _Line, one: _Open, free: list[int]) -> int:
    """Wait for the oldest message and unpack it. Returns the bytes that were written."""
    message, arrived, moved = one.message, one.work is not None, 0
    try:
        if one.work is not None:
            one.work.wait()
    except Exception as error:
        arrived = False
        _lose(line, message.dst if message.src == line.rank else message.src, error)
    if message.dst == line.rank and arrived:
        try:
            for copy, view in message.views(one.data) if one.bucket is not None else ():
                _target(line, copy).copy_(view)
            moved = sum(copy.nbytes for copy in message.copies)
        except Exception as error:
            line.failures.append(error)
    if one.bucket is not None:
        free.append(one.bucket)
    return moved


def _target(line: _Line, copy: Copy) -> torch.Tensor:
    return copy.dst_view.of(line.destination[copy.dst_tensor])[slices(copy.dst_box)]


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1).view(torch.uint8)


def _lose(line: _Line, peer: int, error: Exception) -> None:
    if peer not in line.lost:
        line.lost.add(peer)
        line.failures.append(RuntimeError(f"rank {peer} is lost: {error}"))
