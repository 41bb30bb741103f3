"""Attention over the block pool is attention: any heads, any chunks, any mix of rows, against the definition in double precision."""

from __future__ import annotations

import pytest
import torch

from tests.trtllm_rollout.whole_sequence import attention_of
from trtllm_rollout.embedded.attention import PromptPart, Row, StepAttention
from trtllm_rollout.embedded.backends import BACKENDS, HIDDEN, by_matrix_products, by_sdpa, choose, choose_all
from trtllm_rollout.embedded.heads import Heads
from trtllm_rollout.embedded.kv_cache import KVCache

SIZE = 8
CPU = torch.device("cpu")
HEADS = {
    "grouped": Heads(6, 2, 16, 16, 0.25),
    "one query a key": Heads(3, 3, 16, 16, 0.3),
    "window": Heads(4, 2, 16, 16, 0.25, window=5),
    "window wider than a block": Heads(4, 2, 16, 16, 0.25, window=11),
    "sinks": Heads(4, 2, 16, 16, 0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 3.0])),
    "window and sinks": Heads(4, 1, 16, 16, 0.25, window=9, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "latent": Heads(4, 1, 24, 16, 0.2, latent=True),
    "key and value of different size": Heads(4, 2, 24, 16, 0.2),
}


class Text:
    """Random q, k, v of a text of `prompt` and `own` tokens, its blocks, and what attention over all of it gives."""

    def __init__(self, heads: Heads, prompt: int, own: int, blocks: list[int], seed: int, begin: Text | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = prompt + own
        self.q = torch.randn(total, heads.queries, heads.key_dim, generator=generator)
        self.k = torch.randn(total, heads.kv, heads.key_dim, generator=generator)
        self.v = None if heads.latent else torch.randn(total, heads.kv, heads.value_dim, generator=generator)
        if begin is not None:  # the same prompt
            self.q[:prompt], self.k[:prompt] = begin.q[:prompt], begin.k[:prompt]
            if self.v is not None:
                self.v[:prompt] = begin.v[:prompt]
        self.prompt, self.count = prompt, -(-prompt // SIZE)
        self.prompt_blocks, self.own_blocks = blocks[:self.count], blocks[self.count:]
        self.expected = attention_of((heads,), [total])(0, self.q, self.k, self.v)

    def rows(self, *positions: int) -> list[Row]:
        return [Row(at, self.prompt, self.prompt_blocks, self.own_blocks) for at in positions]


def attend(heads: Heads, cache: KVCache, prompts: list[tuple[Text, int, int]], rows: list[tuple[Text, int]], padding: int = 0) -> torch.Tensor:
    """One step of prompt parts (text, start, stop) and rows (text, position); returns [rows, queries, value_dim]."""
    parts = [PromptPart(start, stop, text.prompt_blocks[:-(-stop // SIZE)]) for text, start, stop in prompts]
    step = StepAttention(cache, [heads], choose_all([heads], CPU), parts, [r for text, at in rows for r in text.rows(at)], padding, CPU)
    tokens = [(text, at) for text, start, stop in prompts for at in range(start, stop)] + rows
    stack = [torch.stack([getattr(text, name)[at] for text, at in tokens] + padding * [getattr(tokens[0][0], name)[0]])
             for name in ("q", "k")]
    v = None if heads.latent else torch.stack([text.v[at] for text, at in tokens] + padding * [tokens[0][0].v[0]])
    return step(0, *stack, v)[:len(tokens)]


@pytest.mark.parametrize("name", HEADS)
def test_chunks_of_prompts_and_rows_of_samples_see_what_the_definition_sees(name: str) -> None:
    """Two samples of one prompt and one of another, mixed with a chunk of a third prompt; blocks out of order, some far apart."""
    heads = HEADS[name]
    cache = KVCache([heads], 64, SIZE, torch.float32, CPU)
    cache.ensure()
    first = Text(heads, 19, 12, [9, 4, 5, 0, 60], 1)
    sibling = Text(heads, 19, 12, [9, 4, 5, 1, 7], 2, begin=first)
    other, late = Text(heads, 8, 20, [2, 3, 30, 8], 3), Text(heads, 21, 0, [11, 10, 12], 4)
    out = attend(heads, cache, [(first, 0, 16), (other, 0, 8)], [])
    torch.testing.assert_close(out, torch.cat([first.expected[:16], other.expected[:8]]), atol=2e-6, rtol=1e-5)
    out = attend(heads, cache, [(first, 16, 19)], [(other, 8), (other, 9)])
    torch.testing.assert_close(out, torch.cat([first.expected[16:19], other.expected[8:10]]), atol=2e-6, rtol=1e-5)
    for at in range(12):
        chunk = {3: [(late, 0, 8)], 5: [(late, 8, 21)]}.get(at, [])
        rows = [(first, 19 + at), (other, 10 + at)] if at == 0 else [(sibling, 18 + at), (first, 19 + at), (other, 10 + at)] if at < 10 else [
            (sibling, 18 + at), (first, 19 + at)]
        out = attend(heads, cache, chunk, rows, padding=at % 3)
        expected = torch.cat([t.expected[a:b] for t, a, b in chunk] + [t.expected[at:at + 1] for t, at in rows])
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_row_is_bit_for_bit_the_same_whatever_else_the_step_computes(name: str) -> None:
    """Alone, with siblings, with strangers, and as one of many tokens computed again at once."""
    heads = HEADS[name]

    def run(siblings: int, strangers: int, at_once: bool) -> torch.Tensor:
        cache = KVCache([heads], 128, SIZE, torch.float32, CPU)
        cache.ensure()
        mine = Text(heads, 21, 18, [0, 1, 2, 3, 4, 5], 1)
        others = [Text(heads, 21, 18, [0, 1, 2, *range(6 + 3 * i, 9 + 3 * i)], 5 + i, begin=mine) for i in range(siblings)]
        apart = [Text(heads, 9, 40, list(range(100 - 7 * i, 107 - 7 * i)), 50 + i) for i in range(strangers)]
        attend(heads, cache, [(text, 0, text.prompt) for text in [*apart, mine]], [])
        if at_once:
            return attend(heads, cache, [], [(t, t.prompt + at) for t in apart for at in range(18)] + [(mine, 21 + at) for at in range(18)])[-18:]
        return torch.cat([attend(heads, cache, [], [(t, t.prompt + at) for t in (*others, *apart, mine)])[-1:] for at in range(18)])

    alone = run(0, 0, False)
    for variant in ((3, 0, False), (0, 5, False), (7, 2, False), (0, 0, True), (0, 2, True)):
        assert torch.equal(run(*variant), alone), variant


@pytest.mark.parametrize("pieces", [(40,), (8, 32), (16, 8, 16), (24, 16)])
def test_a_prompt_in_chunks_is_bit_for_bit_the_prompt_in_one(pieces: tuple[int, ...]) -> None:
    heads = HEADS["grouped"]

    def run(pieces: tuple[int, ...]) -> torch.Tensor:
        cache = KVCache([heads], 16, SIZE, torch.float32, CPU)
        cache.ensure()
        text, out, start = Text(heads, 40, 0, [3, 9, 1, 2, 5], 1), [], 0
        for count in pieces:
            out.append(attend(heads, cache, [(text, start, start + count)], []))
            start += count
        return torch.cat(out)

    assert torch.equal(run(pieces), run((40,)))


def test_the_backends_agree_on_attention_and_on_its_log_sum_exp() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 16, generator=generator) for n in (9, 30, 30))
    bias = torch.where(torch.rand(9, 30, generator=generator) < 0.3, HIDDEN, 0.0)
    for ours, theirs in zip(by_matrix_products(q, k, v, bias, 0.3), by_sdpa(q, k, v, bias, 0.3), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_the_backend_fits_the_heads_and_the_device() -> None:
    assert [choose(h, CPU)[0] for h in HEADS.values()] == ["sdpa"] * 6 + ["latent"] * 2
    assert {choose(h, torch.device("cuda"))[0] for h in HEADS.values()} <= BACKENDS.keys()


def test_the_cache_gives_its_memory_back() -> None:
    cache = KVCache([HEADS["grouped"]] * 2, 16, SIZE, torch.bfloat16, CPU)
    assert cache.nbytes == 0
    cache.ensure()
    assert cache.nbytes == 2 * 2 * 16 * SIZE * 2 * 16 * 4, "fp32 on the CPU"
    cache.drop()
    assert cache.nbytes == 0
