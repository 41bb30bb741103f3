"""Copies between ranks of one host, each taken by its receiver straight out of the sender's memory.

    sender                              receiver
    offer: where the parts lie    ->    (nothing new: 0 bytes)
    parts that must be computed or cast, in two buckets:
    packed in bucket 0 or 1       ->    copied out of the sender's bucket
    bucket is free                <-
                                        copies out of the sender's tensors
    the tensors may change        <-    done

Only these short control messages travel, over gloo. `shared_memory` and `cuda_ipc` say how the memory itself is reached.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from resharding.boxes import slices
from resharding.plan import Copy, Plan
from resharding.transform import Transform
from resharding.transport.buckets import Buckets, buckets_of
from resharding.transport.control import ACK, DONE, OFFER, READY, Control
from resharding.transport.in_place import MoveReport, copy_own, part_in_place
from resharding.transport.memory import Memory, Offer, Place, Reader
from resharding.transport.messages import Message, Pairs, fill, messages_of

SLOT = 4 << 20  # bytes of a bucket that are used: both copies of a packed message then find it in the cache


@dataclass
class _Session:
    """What is remembered between two executions of a plan."""

    outgoing: dict[int, list[Copy]]
    incoming: dict[int, list[Copy]]
    key: object = None  # of the source tensors that are offered
    slot_bytes: int = 0  # of the largest message that this rank packs
    told_buckets: int = 0  # address of the buckets that are offered
    places: dict[int, tuple[Place | None, ...]] = field(default_factory=dict)  # by receiver; storages by address
    packed_out: list[Copy] = field(default_factory=list)
    packed_in: dict[int, list[Copy]] = field(default_factory=dict)
    direct: dict[int, list[tuple[Copy, Place]]] = field(default_factory=dict)
    readers: dict[int, Reader] = field(default_factory=dict)
    messages: list[Message] | None = None


@torch.no_grad()
def run(memory: Memory, control_group: dist.ProcessGroup | None, plan: Plan, source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor], rank: int, bucket_bytes: int, transform: Transform, pairs: Pairs | None) -> MoveReport:
    """Run the plan's copies between `pairs` (None: all, local ones in place). Failures are kept to the end, as in point_to_point."""
    started = time.perf_counter()
    failures: list[Exception] = []
    own = moved = 0
    if pairs is None or (rank, rank) in pairs:
        try:
            own = copy_own(plan, source, destination, rank, transform).bytes
        except Exception as error:
            failures.append(error)
    slot = min(bucket_bytes, SLOT)
    session = _session((memory.name, rank, slot, pairs if pairs is None else frozenset(pairs)), plan, rank, pairs)
    if session.outgoing or session.incoming:
        move = _Move(memory, session, buckets_of(plan, memory.device), Control(control_group, failures), source, destination, rank,
                     slot, transform, failures)
        with memory.lent():
            moved = move.execute()
    if failures:
        raise failures[0]
    return MoveReport(own + moved, time.perf_counter() - started, {"in_place": own, memory.name: moved})


def _session(key: object, plan: Plan, rank: int, pairs: Pairs | None) -> _Session:
    found = plan._cache.get(key)
    if not isinstance(found, _Session):
        outgoing: dict[int, list[Copy]] = defaultdict(list)
        incoming: dict[int, list[Copy]] = defaultdict(list)
        for copy in plan.copies:
            if copy.src_rank != copy.dst_rank and (pairs is None or (copy.src_rank, copy.dst_rank) in pairs):
                if copy.src_rank == rank:
                    outgoing[copy.dst_rank].append(copy)
                if copy.dst_rank == rank:
                    incoming[copy.src_rank].append(copy)
        found = plan._cache[key] = _Session(dict(outgoing), dict(incoming))
    return found


@dataclass
class _Move:
    """One execution on one rank."""

    memory: Memory
    session: _Session
    buckets: Buckets
    control: Control
    source: Mapping[str, torch.Tensor]
    destination: Mapping[str, torch.Tensor]
    rank: int
    slot: int
    transform: Transform
    failures: list[Exception]

    def execute(self) -> int:
        self._offer()
        for peer in self.session.incoming:
            self._take_offer(peer)
        if self.session.messages is None:
            packed = [*self.session.packed_out, *(c for copies in self.session.packed_in.values() for c in copies)]
            self.session.messages = messages_of(packed, self.rank, self.slot)
        moved = self._packed(self.session.messages)
        moved += sum(self._direct(peer) for peer in self.session.incoming)
        self.memory.settle()
        if not self.memory.lasting:
            self.session.readers.clear()
        for peer in self.session.incoming:
            self.control.send(peer, b"", DONE)
        for peer in self.session.outgoing:
            self.control.receive(peer, DONE)
        self.control.finish()
        return moved

    def _offer(self) -> None:
        """Tell every receiver where its parts lie; nothing, where that is what it was told last time."""
        session = self.session
        names = dict.fromkeys(c.src_tensor for mine in session.outgoing.values() for c in mine)
        told = False
        try:
            key = (id(self.transform), addresses(self.source, names))
            told = key == session.key
            if not told:
                session.places = {peer: tuple(map(self._place, mine)) for peer, mine in session.outgoing.items()}
            session.key = key
        except Exception as error:
            self.failures.append(error)
            session.key = None  # offer nothing: packing will find the fault again and keep the protocol
            session.places = {peer: (None,) * len(mine) for peer, mine in session.outgoing.items()}
        if not told:
            session.packed_out = [c for peer, mine in session.outgoing.items() for c, p in zip(mine, session.places[peer]) if p is None]
            session.slot_bytes = max((m.nbytes for m in messages_of(session.packed_out, self.rank, self.slot)), default=0)
            session.messages = None
        self.buckets.reserve(session.slot_bytes)
        moved = self.buckets.tensor.data_ptr() != session.told_buckets
        session.told_buckets = self.buckets.tensor.data_ptr()
        for peer in session.outgoing:
            news = not told or not self.memory.lasting or (moved and None in session.places[peer])
            self.control.send(peer, pickle.dumps(self._offer_to(peer, names, told)) if news else b"", OFFER)

    def _place(self, copy: Copy) -> Place | None:
        part = part_in_place(copy, self.source, self.transform)
        if part is None or part.dtype != copy.dtype or not self.memory.offers(copy, part, copy.dst_rank):
            return None
        size = part.element_size()
        return Place(part.untyped_storage().data_ptr(), part.storage_offset() * size, tuple(part.shape), tuple(s * size for s in part.stride()))

    def _offer_to(self, peer: int, names: Iterable[str], told: bool) -> Offer:
        places = self.session.places[peer]
        numbers: dict[int, int] = {}
        for place in places:
            if place is not None:
                numbers.setdefault(place.storage, len(numbers))
        storages = {t.data_ptr(): t for t in (self.source[name].untyped_storage() for name in names)} if numbers else {}
        return Offer(tuple(self.memory.share(storages[address]) for address in numbers),
                     None if told else tuple(p and p._replace(storage=numbers[p.storage]) for p in places),
                     self.memory.share_buckets(self.buckets) if None in places else None)

    def _take_offer(self, peer: int) -> None:
        content = self.control.receive(peer, OFFER)
        if not content:  # what it said last time holds, or it is lost
            return
        session, copies = self.session, self.session.incoming[peer]
        try:
            offer: Offer = pickle.loads(content)
            if offer.places is not None:
                session.messages = None
                session.packed_in[peer] = [c for c, place in zip(copies, offer.places, strict=True) if place is None]
                session.direct[peer] = [(c, place) for c, place in zip(copies, offer.places, strict=True) if place is not None]
            session.readers[peer] = self.memory.open(offer, self.buckets, self.slot)
        except Exception as error:
            session.readers.pop(peer, None)
            self.failures.append(error)

    def _packed(self, messages: Sequence[Message]) -> int:
        """Messages in rising order of keys; a sender has two unread ones at most. See `messages_of` for why this ends."""
        free, moved = [0, 1], 0
        unread: deque[tuple[Message, int]] = deque()
        for message in messages:
            if message.src == self.rank:
                if not free:
                    free.append(self._acknowledged(*unread.popleft()))
                self._pack(message, free[0])
                self.control.send(message.dst, bytes([free[0]]), READY)
                unread.append((message, free.pop(0)))
            else:
                bucket = self.control.receive(message.src, READY)
                moved += self._unpack(message, bucket[0]) if bucket else 0
                self.control.send(message.src, b"", ACK)
        while unread:
            self._acknowledged(*unread.popleft())
        return moved

    def _acknowledged(self, message: Message, bucket: int) -> int:
        self.control.receive(message.dst, ACK)
        return bucket

    def _pack(self, message: Message, bucket: int) -> None:
        try:
            for copy, view in message.views(self.buckets.part(bucket, message.nbytes)):
                fill(view, copy, self.source, self.transform)
            self.memory.settle()
        except Exception as error:
            self.failures.append(error)

    def _unpack(self, message: Message, bucket: int) -> int:
        try:
            for copy, view in message.views(self.session.readers[message.src].bucket(bucket, message.nbytes)):
                copy.dst_view.of(self.destination[copy.dst_tensor])[slices(copy.dst_box)].copy_(view)
            self.memory.settle()
            return sum(copy.nbytes for copy in message.copies)
        except Exception as error:
            self.failures.append(error)
            return 0

    def _direct(self, peer: int) -> int:
        try:
            if peer not in self.control.lost and self.session.direct.get(peer):
                self.session.readers[peer].read(self.session.direct[peer], self.destination)
                return sum(copy.nbytes for copy, _ in self.session.direct[peer])
        except Exception as error:
            self.failures.append(error)
        return 0


def addresses(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[object]:
    """What an offer and a reader depend on: it changes where a tensor's memory does."""
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in map(tensors.__getitem__, dict.fromkeys(names))]
