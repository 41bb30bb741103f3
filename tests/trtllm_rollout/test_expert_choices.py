"""Which experts a completion says its tokens went to: those that transformers' routers choose for the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.model_config import ModelConfig
from tests.models import write_model
from tests.trtllm_rollout.engines import make_engine, requests
from tests.trtllm_rollout.test_against_transformers import BLOCK, LONGEST, kv_bytes, options, with_shared_beginnings
from tests.worker_pool import run_ranks
from trtllm_rollout.protocol import Completion

TEXTS, MAX_TOKENS = with_shared_beginnings(6), 7


def of_transformers(directory: Path, ids: tuple[int, ...]) -> torch.Tensor:
    """[tokens, layers with experts, top_k], sorted, from the routers' own outputs."""
    from transformers import AutoModelForCausalLM

    model, chosen = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return torch.stack(chosen, 1).sort(-1).values


def generated(directory: str, tp: int = 1, **engine: Any) -> tuple[list[Completion], dict[str, float]]:
    made = make_engine(directory, tp=tp, report_experts=True, **engine)
    done = made.generate(requests(TEXTS, samples=2, max_tokens=MAX_TOKENS, temperature=1.0))
    return done, made.stats()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_choices_are_transformers_of_every_token_but_the_last(family: str, tmp_path: Path) -> None:
    """Plain; in chunks, from cached prompts and computed again after a preemption, all at once; on two ranks with half of the experts each."""
    directory = write_model(tmp_path / "m", family, initializer_range=0.3)
    plain, _ = generated(str(directory), **options("plain", directory, 1))
    crowded, stats = generated(str(directory), **options("crowded", directory, 1))
    assert stats["preemptions"] > 0 and stats["prefix_hit_rate"] > 0
    halves = run_ranks(2, generated, str(directory), 2, moe_ep=2, max_batch_size=3)
    for i, one in enumerate(plain):
        ids = TEXTS[one.request_id] + one.token_ids
        want = of_transformers(directory, ids)[:-1]
        for other in (one, crowded[i], *(done[i] for done, _ in halves)):
            assert other.token_ids == one.token_ids and other.experts is not None
            assert torch.equal(other.experts.long().sort(-1).values, want), (family, one.request_id, one.sample)


def test_the_choices_count_towards_the_budget_and_go_with_the_cache(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", "qwen3_moe")
    model = ModelConfig.from_directory(directory)
    assert model.moe is not None
    budget = kv_bytes(model, 20, 1)
    engines = [make_engine(directory, report_experts=report, block_size=BLOCK, kv_cache_bytes=budget, max_seq_len=LONGEST) for report in (False, True)]
    done = [engine.generate(requests(TEXTS[:1], max_tokens=3, temperature=0))[0] for engine in engines]
    assert done[0].experts is None and done[1].experts is not None
    blocks = [int(engine.stats()["kv_blocks_total"]) for engine in engines]
    per_block = budget // 20 + BLOCK * 2 * len(model.moe_layers) * model.moe.top_k
    assert blocks == [20, budget // per_block] and engines[1].stats()["kv_cache_bytes"] == blocks[1] * per_block
    engines[1].sleep(["kv_cache"])
    assert engines[1].stats()["kv_cache_bytes"] == 0
    engines[1].wake(["kv_cache"])
    again, = engines[1].generate(requests(TEXTS[:1], first_id=1, max_tokens=3, temperature=0))
    assert again.experts is not None and torch.equal(again.experts, done[1].experts)


def test_a_sample_that_is_ended_early_tells_what_was_computed(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", "qwen3_moe", initializer_range=0.3)
    engine = make_engine(directory, report_experts=True)
    engine.submit(requests(TEXTS[1:2], max_tokens=9, temperature=0))
    for _ in range(4):
        engine.step()
    engine.abort([0])
    done, = engine.stream()
    assert done.finish_reason == "abort" and 0 < len(done.token_ids) < 9 and done.experts is not None
    assert torch.equal(done.experts.long().sort(-1).values, of_transformers(directory, TEXTS[1] + done.token_ids)[:-1])
