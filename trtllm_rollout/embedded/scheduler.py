"""Iteration-level scheduling (Orca, OSDI 2022) over a block pool: what is computed in the next step. Plain data in, plain data out.

Requests are served in the order (priority, arrival). A prompt is computed in chunks under a token budget, once for all its samples,
and stays held while one of them runs; samples hold the blocks of their own tokens and never write into the prompt's, so nothing is
copied. Where no block is left, the sample that is served last is put back: its tokens stay, its keys and values are computed again
later, many tokens a step.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trtllm_rollout.embedded.blocks import ROOT, BlockPool
from trtllm_rollout.protocol import Request


@dataclass(eq=False)
class Sample:
    """One started sample: `tokens` it has, of which `cached` have keys and values in `blocks`."""

    group: Group
    index: int
    tokens: int = 0
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        return (*self.group.rank, self.index)


@dataclass(eq=False)
class Group:
    """A request, its prompt's `blocks` ([]: not held) of which `computed` tokens are there, and its samples."""

    request: Request
    order: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    node: int = ROOT
    started: int = 0
    running: list[Sample] = field(default_factory=list)
    preempted: list[Sample] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.order

    @property
    def remaining(self) -> int:
        """Samples that have never run."""
        return self.request.samples - self.started

    @property
    def waiting(self) -> int:
        return self.remaining + len(self.preempted)

    @property
    def ready(self) -> bool:
        return self.computed == len(self.request.prompt_ids)


@dataclass(frozen=True)
class Chunk:
    """Compute tokens [start, stop) of the group's prompt."""

    group: Group
    start: int
    stop: int


@dataclass(frozen=True)
class Run:
    """Compute keys and values of the sample's own tokens [start, stop); if that is all it has, draw its next one."""

    sample: Sample
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """One step. `starts`: samples whose first token is drawn from what follows their prompt."""

    chunks: tuple[Chunk, ...]
    runs: tuple[Run, ...]
    starts: tuple[Sample, ...]


class Scheduler:
    """Unfinished requests and the running samples. A step is `plan`, then `drawn` and `finish` with what came of it."""

    def __init__(self, pool: BlockPool, max_batch_size: int, max_num_tokens: int) -> None:
        self.pool, self._max_batch_size, self._max_num_tokens = pool, max_batch_size, max_num_tokens
        self._added = 0
        self.groups: list[Group] = []  # in the order of service
        self.running = self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.groups)

    def add(self, requests: Sequence[Request]) -> list[Group]:
        groups = [Group(request, self._added + i) for i, request in enumerate(requests)]
        self._added += len(groups)
        for group in groups:
            bisect.insort(self.groups, group, key=lambda g: g.rank)
        return groups

    def plan(self) -> Plan:
        """What to compute next; blocks for it are taken, tokens count as computed."""
        runs = self._runs()
        budget = self._max_num_tokens - sum(run.stop - run.start for run in runs)
        chunks: list[Chunk] = []
        starts: list[Sample] = []
        free = self._max_batch_size - self.running  # samples that may still begin, less those that prompts under way will begin
        for group in [g for g in self.groups if g.waiting]:
            if free <= 0 or not (group.blocks or self._admit(group)):
                break  # nobody is served before one who came first
            if not group.ready:
                chunk = self._chunk(group, budget)
                if chunk is None:
                    break
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
            if group.ready:
                starts += self._start(group)
                free = min(free, self._max_batch_size - self.running)
                if group.waiting:
                    break  # neither a slot nor a block for it
            else:
                free -= group.waiting
        return Plan(tuple(chunks), tuple(runs), tuple(starts))

    def drawn(self, sample: Sample) -> None:
        """The sample has one token more."""
        sample.tokens += 1

    def finish(self, sample: Sample) -> None:
        """The running or preempted sample has ended."""
        group = sample.group
        if sample in group.running:
            group.running.remove(sample)
            self.running -= 1
        else:
            group.preempted.remove(sample)
        self._drop(sample)
        self._tidy(group)

    def cancel(self, request_ids: Iterable[int]) -> tuple[list[Sample], list[tuple[Group, int]]]:
        """Start nothing more of these requests. Returns their started samples, still to be finished, and those that never ran."""
        ids = set(request_ids)
        chosen = [g for g in self.groups if g.request.request_id in ids]
        never = [(g, k) for g in chosen for k in range(g.started, g.request.samples)]
        started = [s for g in chosen for s in sorted((*g.running, *g.preempted), key=lambda s: s.index)]
        for group in chosen:
            group.started = group.request.samples
            self._tidy(group)
        return started, never

    def reset_cache(self) -> None:
        """Forget cached prompts; there is no work when weights change."""
        self.pool.reset_cache()

    def _runs(self) -> list[Run]:
        """The next tokens of every running sample: one each, and while the budget lasts more for those that compute old ones again."""
        runs: list[Run] = []
        spare = self._max_num_tokens - self.running
        for group in list(self.groups):
            for sample in sorted(group.running, key=lambda s: s.index):
                if sample not in group.running:  # put back for one before it
                    continue
                count = min(sample.tokens - sample.cached, 1 + max(spare, 0))
                if not self._grow(sample, sample.cached + count):
                    continue
                spare -= count - 1
                runs.append(Run(sample, sample.cached, sample.cached + count))
                sample.cached += count
        return runs

    def _grow(self, sample: Sample, tokens: int) -> bool:
        """Take the blocks for `tokens` own tokens; False where the sample itself was put back for lack of them."""
        while (lacking := self.pool.blocks_for(tokens) - len(sample.blocks)) > 0:
            blocks = self.pool.take(lacking)
            if blocks is not None:
                sample.blocks += blocks
            elif self._give_way() is sample:
                return False
        return True

    def _give_way(self) -> Sample | None:
        """Free blocks of what is served last: a sample, which is returned, or a prompt that none of its samples reads."""
        group = next(g for g in reversed(self.groups) if g.blocks)
        if not group.running:
            self._release_prompt(group)
            return None
        sample = max(group.running, key=lambda s: s.index)
        group.running.remove(sample)
        bisect.insort(group.preempted, sample, key=lambda s: s.index)
        self.running -= 1
        self.preemptions += 1
        sample.preemptions += 1
        self._drop(sample)
        if not group.running:
            self._release_prompt(group)
        return sample

    def _admit(self, group: Group) -> bool:
        """Hold the blocks of a prompt; what the prefix cache has of it counts as computed. False where there are not enough."""
        ids = group.request.prompt_ids
        total = self.pool.blocks_for(len(ids))
        counted = self.pool.looked_up, self.pool.found
        found, node = self.pool.lookup(ids) if not group.request.sampling.prompt_log_probs else ([], ROOT)
        blocks = None
        if self._room(group, total - len(found) + 1):
            blocks = self.pool.take(total - len(found))
        if blocks is None:
            self.pool.release(found)
            self.pool.looked_up, self.pool.found = counted  # it is looked up again, every step, until there is room
            return False
        group.blocks, group.computed, group.node = found + blocks, len(found) * self.pool.block_size, node
        return True

    def _room(self, group: Group, blocks: int) -> bool:
        """Whether so many can be taken without soon putting somebody back; where nothing runs, prompts that come later give way."""
        while not self.running and self.pool.available < blocks:
            last = next((g for g in reversed(self.groups) if g.blocks), group)
            if last.rank <= group.rank:
                break
            self._release_prompt(last)
        return self.pool.available >= blocks + self.running // 4

    def _chunk(self, group: Group, budget: int) -> Chunk | None:
        """The next tokens of a prompt within the budget: whole blocks, or all that is left."""
        start, total, size = group.computed, len(group.request.prompt_ids), self.pool.block_size
        stop = min(total, start + budget)
        if stop < total:
            stop -= stop % size
        if stop <= start:
            return None
        group.computed = stop
        for block in range(start // size, stop // size):
            group.node = self.pool.publish(group.node, group.request.prompt_ids[block * size:(block + 1) * size], group.blocks[block])
        return Chunk(group, start, stop)

    def _start(self, group: Group) -> list[Sample]:
        """Begin, or take up again, samples of a computed prompt while there are slots and blocks. Returns those that begin."""
        new: list[Sample] = []
        while group.waiting and self.running < self._max_batch_size:
            again = group.preempted[0] if group.preempted else None
            if not self._room(group, self.pool.blocks_for(again.tokens + 1) if again else 1):
                break
            if again:
                sample = group.preempted.pop(0)
            else:
                sample = Sample(group, group.started, blocks=self.pool.take(1) or [])
                group.started += 1
                new.append(sample)
            group.running.append(sample)
            self.running += 1
        return new

    def _drop(self, sample: Sample) -> None:
        self.pool.release(sample.blocks)
        sample.blocks, sample.cached = [], 0

    def _release_prompt(self, group: Group) -> None:
        self.pool.release(group.blocks)
        group.blocks, group.computed, group.node = [], 0, ROOT

    def _tidy(self, group: Group) -> None:
        """Release what a group does not need any more, and forget it when it is done."""
        if group.running or group.waiting:
            return
        if group.blocks:
            self._release_prompt(group)
        if group in self.groups:
            self.groups.remove(group)
