"""The plan of micro-batches: every sequence once, within the budget, the work balanced, nothing computed that nobody needs."""

from __future__ import annotations

import random

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.micro_batch import Segment, make_micro_batches
from parallel.model_config import ModelConfig
from parallel.packed_rows import make_buckets
from parallel.packing import Batching, Work, plan_micro_batches

MODEL = ModelConfig("llama", hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=203,
                    max_position_embeddings=4096)


def groups(count: int, seed: int, responses: int = 8) -> tuple[list[list[int]], list[list[bool]]]:
    """GRPO groups with prompts and responses of very different lengths."""
    r = random.Random(seed)
    ids, masks = [], []
    for g in range(count):
        prompt = [1 + g] + [r.randrange(4, 200) for _ in range(r.randint(3, 90))]
        for _ in range(responses):
            n = min(400, int(r.expovariate(1 / 60)) + 1)
            ids.append(prompt + [r.randrange(4, 200) for _ in range(n)])
            masks.append([False] * len(prompt) + [True] * n)
    return ids, masks


@pytest.mark.parametrize("packing", ["packed", "padded", "shared_prompt"])
@pytest.mark.parametrize("max_tokens", [None, 512, 3000])
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp=3, sequence_parallel=True), ParallelConfig(pp=4, vpp=2)])
def test_every_sequence_once_within_the_budget_and_as_many_micro_batches_everywhere(
        packing: str, max_tokens: int | None, parallel: ParallelConfig) -> None:
    for seed, dp in enumerate((1, 2, 3, 8)):
        ids, masks = groups(5, seed)
        plan = plan_micro_batches(ids, range(1, len(ids)), masks, 6, Batching(packing, max_tokens), MODEL, parallel, dp)
        assert sorted(i for rank in plan for batch in rank for i in batch) == list(range(1, len(ids)))
        assert len(plan) == dp and len({len(rank) for rank in plan}) == 1
        assert parallel.chunks == 1 or len(plan[0]) % parallel.pp == 0
        if max_tokens is None:
            assert max(len(batch) for rank in plan for batch in rank) <= 6
        for rank in plan:
            layout = ParallelConfig(tp=parallel.tp, sequence_parallel=parallel.sequence_parallel)
            for batch in make_micro_batches(ids, rank, layout, packing, masks):
                assert batch.tokens.shape[1] % parallel.tp == 0
                assert max_tokens is None or not batch.indices or batch.tokens.numel() <= max_tokens
                assert sum(map(len, map(masks.__getitem__, batch.indices))) - len(batch.indices) == len(batch.spread)
                assert len(batch.rows) == sum(sum(masks[i]) for i in batch.indices)


def test_ranks_get_work_and_not_counts() -> None:
    """Of expensive and cheap sequences no rank gets more than the ideal share and the largest sequence's rest."""
    ids, masks = groups(12, 7)
    ids[0] = ids[0] + [5] * 2000
    masks[0] = masks[0] + [True] * 2000
    work = Work(MODEL)
    for dp in (2, 4):
        plan = plan_micro_batches(ids, range(len(ids)), masks, 8, Batching("packed", 2600), MODEL, ParallelConfig(), dp)
        loads = [sum(work(len(ids[i]) - 1) for batch in rank for i in batch) for rank in plan]
        biggest = max(work(len(s) - 1) for s in ids)
        assert max(loads) <= max(1.02 * sum(loads) / dp, biggest), loads


def test_work_is_what_a_count_of_multiplications_gives() -> None:
    """The quadratic term: 4 layers of 4 heads, a score and a weighted sum of 16 for each of the 1 + .. + n keys."""
    work = Work(MODEL)
    assert work(10) - 10 * work.per_token == 4 * 4 * (16 + 16) * 55
    assert work(30) == pytest.approx(work(20) + work(10, before=20))
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert work.per_token == 4 * layer + 203 * 64


def test_a_shared_prompt_stands_in_the_row_once_and_unneeded_tokens_not_at_all() -> None:
    ids = [[7, 8, 9, 20, 21, 22], [7, 8, 9, 30], [7, 8, 9, 40, 41], [5, 5, 5]]
    masks = [[False] * 3 + [True] * 3, [False] * 3 + [True], [False] * 3 + [True] * 2, [False] * 3]
    shared, = make_micro_batches(ids, [[0, 1, 2, 3]], ParallelConfig(), "shared_prompt", masks)
    assert shared.tokens.tolist() == [[7, 8, 9, 20, 21, 40]] and shared.positions.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert shared.rows.tolist() == [2, 3, 4, 2, 2, 5] and shared.targets.tolist() == [20, 21, 22, 30, 40, 41]
    assert [(s.start, s.length, s.prefix) for s in shared.segments or ()] == [(0, 3, (0, 0)), (3, 2, (0, 3)), (5, 1, (0, 3))]
    packed, = make_micro_batches(ids, [[0, 1, 2, 3]], ParallelConfig(), "packed", masks)
    assert packed.tokens.tolist() == [[7, 8, 9, 20, 21, 7, 8, 9, 7, 8, 9, 40]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]


def test_a_sequence_longer_than_the_budget_is_refused_with_what_would_fit() -> None:
    with pytest.raises(UserError, match="max_tokens_per_micro_batch is 30, but sequence 1 alone has 39 tokens; raise it to at least 40"):
        plan_micro_batches([[1] * 10, [1] * 40], [0, 1], None, 4, Batching("packed", 30), MODEL, ParallelConfig(tp=2, sequence_parallel=True), 1)


def test_attention_in_buckets_is_that_of_every_token_over_what_it_sees() -> None:
    """In float64, against one softmax over the whole row under the mask that segments mean; gradients too, and few calls."""
    segments = [Segment(0, 40), Segment(40, 35), Segment(75, 3), Segment(78, 5, (0, 40)), Segment(83, 2, (0, 40)),
                Segment(85, 1, (75, 3)), Segment(86, 4)]
    tokens = 93  # three of padding
    owner = torch.tensor([i for i, n in enumerate([*(s.length for s in segments), 3]) for _ in range(n)])
    sees = (owner[:, None] == owner) & (torch.arange(tokens)[:, None] >= torch.arange(tokens))
    for i, s in enumerate(segments):
        sees[owner == i, s.prefix[0]:sum(s.prefix)] = True
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, 2, n, dtype=torch.float64, requires_grad=True) for n in (4, 4, 6))
    calls = []

    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: int) -> torch.Tensor:
        calls.append(before)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(before)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    got = make_buckets(segments, tokens, "cpu").attend(q, k, v, core)
    want = torch.einsum("hts,shd->thd", (torch.einsum("thd,shd->hts", q, k) / 2).masked_fill(~sees, float("-inf")).softmax(-1), v)
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(got) * (torch.arange(tokens) < 90)[:, None, None]
    for a, b in zip(torch.autograd.grad((got * weights).sum(), (q, k, v)), torch.autograd.grad((want * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)
    assert sorted(calls) == [0, 0, 3, 40]
