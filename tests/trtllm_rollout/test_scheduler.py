"""The scheduler, without a model: every token is computed once its predecessors are there, in a fair order, within budget and blocks."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_rollout.embedded.blocks import BlockPool
from trtllm_rollout.embedded.scheduler import Plan, Sample, Scheduler
from trtllm_rollout.protocol import Request, SamplingParams

SIZE = 4


class Simulation:
    """A scheduler and a record of which tokens have keys and values: what an engine would have computed."""

    def __init__(self, blocks: int, batch: int, budget: int, cached: bool = True) -> None:
        self.scheduler = Scheduler(BlockPool(blocks, SIZE, cached), batch, budget)
        self.batch, self.budget = batch, budget
        self.done: dict[tuple[int, int], int] = {}
        self.cached: dict[Sample, int] = {}
        self.steps: list[Plan] = []

    def add(self, *requests: Request) -> None:
        self.scheduler.add(requests)

    def step(self) -> Plan:
        """One step; checks that what it computes can be computed."""
        plan = self.scheduler.plan()
        self.steps.append(plan)
        running = [s for g in self.scheduler.groups for s in g.running]
        assert len(running) == self.scheduler.running <= self.batch
        assert sum(c.stop - c.start for c in plan.chunks) + sum(r.stop - r.start for r in plan.runs) <= self.budget
        own = [b for s in running for b in s.blocks]
        prompts = {b for g in self.scheduler.groups for b in g.blocks}
        assert len(own) == len(set(own)) and not prompts & set(own), "a block of own tokens has one holder"
        assert len(own) + len(prompts) == self.scheduler.pool.used
        for chunk in plan.chunks:
            assert chunk.start % SIZE == 0 and (chunk.stop % SIZE == 0 or chunk.stop == len(chunk.group.request.prompt_ids)), "whole tiles"
            assert len(chunk.group.blocks) * SIZE >= chunk.stop
        draws = list(plan.starts)
        for run in plan.runs:
            sample = run.sample
            assert sample in running and sample.group.ready and run.start < run.stop <= sample.tokens
            assert run.start == (self.cached.get(sample, 0) if run.start else 0), "no token is skipped"
            assert len(sample.blocks) * SIZE >= run.stop
            self.cached[sample] = run.stop
            if run.stop == sample.tokens:
                draws.append(sample)
        assert len(draws) == len(set(draws))
        assert all(s.group.ready for s in plan.starts)
        for sample in draws:
            self.scheduler.drawn(sample)
            if sample.tokens == sample.group.request.sampling.max_tokens:
                self.done[sample.group.request.request_id, sample.index] = sample.tokens
                self.scheduler.finish(sample)
        return plan

    def run(self, limit: int = 5000) -> None:
        while self.scheduler.busy:
            assert len(self.steps) < limit, "no progress"
            self.step()
        assert self.scheduler.pool.used == 0 and self.scheduler.running == 0, "a leaked block or slot"


def request(number: int, prompt: int, tokens: int, samples: int = 1, priority: int = 0, begin: int = 0) -> Request:
    """A prompt of its own, but for its first `begin` tokens, which all such prompts share."""
    ids = tuple([7] * begin + [100 + number] * (prompt - begin))
    return Request(number, ids, SamplingParams(max_tokens=tokens), samples, priority=priority)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6))
def test_all_work_is_done_and_all_blocks_come_back(seed: int) -> None:
    """Random requests with priorities and shared beginnings come while others run, some are aborted, in a pool that is often too small."""
    rng = random.Random(seed)
    batch, blocks = rng.randint(1, 6), rng.randint(8, 30)
    simulation = Simulation(blocks, batch, batch + SIZE + rng.randint(0, 20), cached=rng.random() < 0.7)
    expected: dict[tuple[int, int], int] = {}
    number = 0
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.randint(1, 4)):
            prompt, tokens = rng.randint(1, 16), rng.randint(1, 16)
            new = request(number, prompt, tokens, rng.randint(1, 4), rng.randint(0, 2), begin=rng.choice((0, min(prompt, 8))))
            expected.update({(number, k): tokens for k in range(new.samples)})
            simulation.add(new)
            number += 1
        for _ in range(rng.randint(0, 15)):
            if simulation.scheduler.busy:
                simulation.step()
        if rng.random() < 0.4:
            chosen = rng.randrange(number)
            started, never = simulation.scheduler.cancel([chosen])
            for sample in started:
                simulation.scheduler.finish(sample)
            for key in [(chosen, s.index) for s in started] + [(chosen, k) for _, k in never]:
                del expected[key]
    simulation.run()
    assert simulation.done == expected


def test_a_prompt_is_computed_once_for_all_its_samples_in_chunks_that_leave_the_running_their_step() -> None:
    simulation = Simulation(64, batch=3, budget=12)
    simulation.add(request(0, 2, 30))
    simulation.step()
    simulation.add(request(1, 30, 3, samples=5))
    plans = [simulation.step() for _ in range(4)]
    assert [[(c.start, c.stop) for c in p.chunks] for p in plans] == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 30)]]
    assert all(any(r.sample.group.request.request_id == 0 for r in p.runs) for p in plans), "the running sample is not held up"
    assert [len(p.starts) for p in plans] == [0, 0, 0, 2], "two slots are free"
    simulation.run()
    assert sum(c.stop - c.start for p in simulation.steps for c in p.chunks if c.group.request.request_id == 1) == 30


def test_a_shared_beginning_is_computed_once_also_by_prompts_of_one_step() -> None:
    simulation = Simulation(64, batch=8, budget=100)
    simulation.add(*(request(i, 21, 2, begin=17) for i in range(3)))
    plan = simulation.step()
    assert [(c.start, c.stop) for c in plan.chunks] == [(0, 21), (16, 21), (16, 21)], "four whole blocks are shared"
    simulation.run()
    again = Simulation(64, batch=8, budget=100, cached=False)
    again.add(*(request(i, 21, 2, begin=17) for i in range(3)))
    assert [(c.start, c.stop) for c in again.step().chunks] == [(0, 21)] * 3


def test_a_prompt_that_waits_for_blocks_counts_as_looked_up_once() -> None:
    simulation = Simulation(8, batch=4, budget=40)
    simulation.add(request(0, 9, 10, begin=8), request(1, 21, 2, begin=8))
    simulation.run()
    assert len(simulation.steps) > 10, "the second waited for the first to end"
    assert (simulation.scheduler.pool.looked_up, simulation.scheduler.pool.found) == (9 + 21, 8)


def test_smaller_priorities_go_first_and_equal_ones_in_order_of_arrival() -> None:
    simulation = Simulation(64, batch=1, budget=100)
    simulation.add(request(0, 3, 2), request(1, 3, 2, priority=1), request(2, 3, 2), request(3, 3, 2, priority=-1))
    simulation.run()
    assert [number for number, _ in simulation.done] == [3, 0, 2, 1]


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    simulation = Simulation(10, batch=4, budget=40)
    simulation.add(request(0, 8, 6), request(1, 8, 6), request(2, 20, 4))
    for number in range(3, 40):
        simulation.add(request(number, 1, 2))
    simulation.run()
    begun = [s.group.request.request_id for plan in simulation.steps for s in plan.starts]
    assert begun == sorted(begun)


def test_without_blocks_the_last_served_is_put_back_and_computed_again_many_tokens_a_step() -> None:
    simulation = Simulation(8, batch=2, budget=16, cached=False)
    simulation.add(request(0, 4, 20), request(1, 4, 20, priority=1))
    simulation.run()
    assert list(simulation.done) == [(0, 0), (1, 0)] and simulation.scheduler.preemptions == 1
    before = [[r.stop - r.start for r in p.runs if r.sample.group.request.request_id == 0] for p in simulation.steps]
    assert all(len(counts) <= 1 and counts in ([], [1]) for counts in before), "the first is never disturbed"
    longest = max(r.stop - r.start for p in simulation.steps for r in p.runs if r.sample.group.request.request_id == 1)
    assert longest > 4, "old tokens are computed again together"


def test_an_abort_frees_slot_and_blocks_at_once() -> None:
    simulation = Simulation(16, batch=2, budget=40)
    simulation.add(request(0, 4, 20, samples=5), request(1, 4, 2))
    simulation.step()
    started, never = simulation.scheduler.cancel([0])
    assert [s.index for s in started] == [0, 1] and [k for _, k in never] == [2, 3, 4]
    for sample in started:
        simulation.scheduler.finish(sample)
    assert simulation.scheduler.pool.used == 0
    simulation.run()
    assert list(simulation.done) == [(1, 0)]
