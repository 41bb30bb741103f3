"""Iteration-level scheduling (Orca, OSDI 2022): which sample sits in which slot. Plain data in, plain data out.

Active samples always fill slots 0..n-1. A prompt is computed once: its further samples copy the cache of a running sibling,
or take over the slot of a finishing one, whose first positions are that prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trtllm_rollout.protocol import Request


@dataclass(eq=False)
class Group:
    """A request and how many of its samples have been given a slot."""

    request: Request
    order: int
    started: int = 0

    @property
    def remaining(self) -> int:
        return self.request.samples - self.started

    def take(self) -> int:
        """The next sample to start."""
        self.started += 1
        return self.started - 1


@dataclass(frozen=True)
class Start:
    """Sample `sample` of `group` begins in `slot`, copying its prompt's cache from slot `source` unless it is there already."""

    slot: int
    group: Group
    sample: int
    source: int | None = None


@dataclass(frozen=True)
class Admission:
    """Prompts to compute, prompt i into slot first_slot + i (ordered by length), and the samples that begin."""

    prefill: tuple[Group, ...]
    first_slot: int
    starts: tuple[Start, ...]


@dataclass(frozen=True)
class Retirement:
    """What follows from finished slots: samples that take a slot over in place, then moves (source, target) that close gaps."""

    handovers: tuple[Start, ...]
    moves: tuple[tuple[int, int], ...]


class Scheduler:
    """Waiting groups and the occupants of the active slots."""

    def __init__(self, max_batch_size: int, max_prefill_tokens: int) -> None:
        self._max_batch_size, self._max_prefill_tokens = max_batch_size, max_prefill_tokens
        self._added = 0
        self.waiting: deque[Group] = deque()
        self.running: list[tuple[Group, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.waiting.append(Group(request, self._added))
            self._added += 1

    def groups(self) -> list[Group]:
        """Every unfinished group once."""
        return list(dict.fromkeys((*(g for g, _ in self.running), *self.waiting)))

    def admit(self) -> Admission:
        """Fill free slots: first the unstarted samples of running prompts, then waiting prompts in order of arrival."""
        starts: list[Start] = []
        for slot, (group, _) in enumerate(list(self.running)):
            while group.remaining and len(self.running) < self._max_batch_size:
                starts.append(self._start(group, slot))
        chosen: list[Group] = []
        free, tokens = self._max_batch_size - len(self.running), 0
        while self.waiting and free > 0:
            length = len(self.waiting[0].request.prompt_ids)
            if chosen and tokens + length > self._max_prefill_tokens:
                break
            group = self.waiting.popleft()
            chosen.append(group)
            tokens += length
            free -= min(free, group.request.samples)
        chosen.sort(key=lambda g: len(g.request.prompt_ids))
        first = len(self.running)
        starts += [self._start(group, None) for group in chosen]
        for i, group in enumerate(chosen):
            while group.remaining and len(self.running) < self._max_batch_size:
                starts.append(self._start(group, first + i))
        return Admission(tuple(chosen), first, tuple(starts))

    def _start(self, group: Group, source: int | None) -> Start:
        start = Start(len(self.running), group, group.take(), source)
        self.running.append((group, start.sample))
        return start

    def retire(self, slots: Iterable[int]) -> Retirement:
        """Free finished `slots`."""
        handovers, holes = [], []
        for slot in sorted(slots):
            group = self.running[slot][0]
            if group.remaining:
                handovers.append(Start(slot, group, group.take()))
                self.running[slot] = (group, handovers[-1].sample)
            else:
                holes.append(slot)
        keep = len(self.running) - len(holes)
        gone = set(holes)
        survivors = (slot for slot in range(keep, len(self.running)) if slot not in gone)
        moves = tuple((next(survivors), hole) for hole in holes if hole < keep)
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[keep:]
        return Retirement(tuple(handovers), moves)

    def cancel(self, request_ids: Iterable[int]) -> tuple[list[int], list[tuple[Group, int]]]:
        """Start nothing more of these requests. Returns their active slots, still to be retired, and the samples that never ran."""
        ids = set(request_ids)
        never: list[tuple[Group, int]] = []
        for group in self.groups():
            if group.request.request_id in ids:
                never += [(group, group.take()) for _ in range(group.remaining)]
        self.waiting = deque(g for g in self.waiting if g.request.request_id not in ids)
        return [slot for slot, (g, _) in enumerate(self.running) if g.request.request_id in ids], never
