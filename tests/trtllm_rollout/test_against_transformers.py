"""The engine computes what transformers computes: greedy tokens and log-probs, alone and tensor parallel."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.rollout import check_engine_size
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from tests.models import FAMILY_TINY, LLAMA3_ROPE, TINY, write_model
from tests.parallel.test_families import WITH_EXPERTS
from tests.trtllm_rollout.engines import greedy_reference, make_engine, prompts, recomputed_log_probs, requests
from tests.worker_pool import run_ranks

MODELS = {
    **{family: dict(family=family) for family in FAMILY_TINY},
    "llama tied": dict(family="llama", tie_word_embeddings=True),
    "llama with llama3 rope": dict(family="llama", rope_parameters=LLAMA3_ROPE),
    "llama with its own head_dim": dict(family="llama", head_dim=32),
    "qwen2 tied": dict(family="qwen2", tie_word_embeddings=True),
}
BLOCK = 4
LONGEST, MAX_TOKENS = 40, 10


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name.replace(" ", "_"), seed=i, **options) for i, (name, options) in enumerate(MODELS.items())}


def kv_bytes(model: ModelConfig, blocks: int, tp: int) -> int:
    """What `blocks` blocks of BLOCK tokens take in fp32 on one rank."""
    per_token = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim if model.mla else 2 * max(1, model.num_kv_heads // tp) * model.head_dim
    return blocks * BLOCK * model.num_layers * per_token * 4


def options(mode: str, directory: str | Path, tp: int) -> dict[str, Any]:
    """Of an engine: a batch smaller than the work; or chunks, shared blocks and a KV cache that the batch does not fit, all at once."""
    if mode == "plain":
        return dict(max_batch_size=3, enable_prefix_cache=False)
    blocks = -(-(LONGEST + 5) // BLOCK) + -(-MAX_TOKENS // BLOCK) + 1  # little more than the longest request
    return dict(max_batch_size=8, block_size=BLOCK, max_num_tokens=16, kv_cache_bytes=kv_bytes(ModelConfig.from_directory(directory), blocks, tp))


def with_shared_beginnings(count: int) -> list[tuple[int, ...]]:
    """Prompts of random lengths, every third one longer by a few tokens than the one before."""
    texts = prompts(count, longest=LONGEST)
    for i in range(2, count, 3):
        texts[i] = texts[i - 1] + (7, 8, 9, 10, 11)[:1 + i % 5]
    return texts


TEXTS = with_shared_beginnings(6)


@lru_cache(maxsize=None)
def of_generate(directory: str) -> list[tuple[int, ...]]:
    return greedy_reference(directory, TEXTS, MAX_TOKENS, stop=None)


def _greedy(directory: str, texts: list[tuple[int, ...]], max_tokens: int, stop: tuple[int, ...], tp: int = 1, mode: str = "plain",
            moe_ep: int = 1) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    engine = make_engine(directory, tp=tp, moe_ep=moe_ep, **options(mode, directory, tp))
    done = engine.generate(requests(texts, temperature=0, max_tokens=max_tokens, stop_token_ids=stop))
    return [c.token_ids for c in done], engine.stats()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_generate(name: str, directories: dict[str, Path]) -> None:
    """Ragged prompts, more of them than fit the batch; then in chunks, from shared blocks, and preempted."""
    texts, expected = TEXTS, of_generate(str(directories[name]))
    plain, _ = _greedy(str(directories[name]), texts, MAX_TOKENS, ())
    assert plain == expected
    crowded, stats = _greedy(str(directories[name]), texts, MAX_TOKENS, (), mode="crowded")
    assert crowded == expected
    assert stats["preemptions"] > 0 and stats["prefix_hit_rate"] > 0 and stats["steps"] > sum(map(len, texts)) * (1 - stats["prefix_hit_rate"]) / 16


def test_positions_beyond_the_original_context_of_scaled_rotations(directories: dict[str, Path]) -> None:
    """llama3 and YaRN change the frequencies; the original contexts are 64 tokens."""
    texts = prompts(3, longest=90, seed=2)
    assert max(map(len, texts)) > 70
    for name in ("llama with llama3 rope", "deepseek_v3", "gpt_oss"):
        assert _greedy(str(directories[name]), texts, 20, ())[0] == greedy_reference(directories[name], texts, 20, stop=None), name


def _greedy_of_all(cases: list[tuple[str, int]], texts: list[tuple[int, ...]], tp: int) -> list[list[tuple[int, ...]]]:
    return [_greedy(directory, texts, MAX_TOKENS, (), tp, "crowded", moe_ep)[0] for directory, moe_ep in cases]


def test_greedy_tokens_are_those_of_generate_on_two_ranks(directories: dict[str, Path]) -> None:
    """Every family tensor parallel, and those with experts expert parallel too."""
    cases = [(str(directories[name]), 1) for name in (*FAMILY_TINY, "qwen2 tied")] + [(str(directories[name]), 2) for name in WITH_EXPERTS]
    for of_rank in run_ranks(2, _greedy_of_all, cases, TEXTS[:4], 2):
        for case, tokens in zip(cases, of_rank, strict=True):
            assert tokens == of_generate(case[0])[:4], case


@pytest.mark.parametrize(("family", "tp", "moe_ep", "words"), [
    ("llama", 2, 2, "llama has no experts"), ("qwen3_moe", 2, 4, r"it must divide rollout.tp 2 and the 8 experts .*choose 1 or 2"),
    ("mixtral", 8, 1, "num_attention_heads 4"), ("glm4_moe", 4, 3, "choose 1 or 2 or 4")])
def test_sizes_that_do_not_fit_are_refused_before_anything_is_built(family: str, tp: int, moe_ep: int, words: str) -> None:
    model = ModelConfig.from_hf({"model_type": family, **TINY, **FAMILY_TINY[family]})
    with pytest.raises(UserError, match=words):
        check_engine_size(tp, 8, model, moe_ep=moe_ep)


def test_fp8_blocks_that_the_ranks_cut_are_refused_before_anything_is_built() -> None:
    model = ModelConfig.from_hf({"model_type": "qwen3_moe", **TINY, **FAMILY_TINY["qwen3_moe"], "moe_intermediate_size": 128, "hidden_size": 128,
                                 "head_dim": 64, "num_key_value_heads": 4})
    check_engine_size(1, 2, model, fp8=True)
    check_engine_size(2, 2, model, moe_ep=2, fp8=True)
    with pytest.raises(UserError, match=r"experts.w3_w1_weight cannot be FP8.* do not lie on blocks of 128"):
        check_engine_size(2, 2, model, fp8=True)


@pytest.mark.parametrize("family", FAMILY_TINY)
def test_no_family_is_refused(family: str) -> None:
    """What `mcore-rl train` and `generate` ask before anything is built."""
    check_engine_size(2, 4, ModelConfig.from_hf({"model_type": family, **TINY, **FAMILY_TINY[family]}), moe_ep=2 if family in WITH_EXPERTS else 1)


def test_key_value_heads_are_repeated_where_tp_exceeds_them(directories: dict[str, Path]) -> None:
    """tp 4 over 2 key-value heads, and a vocabulary of 203 that 4 does not divide."""
    texts = prompts(5)
    expected = greedy_reference(directories["llama"], texts, 12, stop=None)
    assert [tokens for tokens, _ in run_ranks(4, _greedy, str(directories["llama"]), texts, 12, (), tp=4)] == [expected] * 4


def test_greedy_of_a_trained_model(stories260k: Path | None, directories: dict[str, Path]) -> None:
    directory = stories260k or directories["llama"]
    texts = [(1,), (1, 100, 60), tuple(range(1, 40))]
    assert _greedy(str(directory), texts, 60, ())[0] == greedy_reference(directory, texts, 60, stop=None)


def _sampled(directory: str, tp: int, dtype: torch.dtype = torch.float32) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    engine = make_engine(directory, tp=tp, dtype=dtype)
    done = engine.generate(requests(prompts(4), samples=2, temperature=0.7, top_k=40, top_p=0.9, max_tokens=12))
    return [(c.token_ids, c.log_probs) for c in done]


@pytest.mark.parametrize("name", ["llama", "qwen2 tied"])
@pytest.mark.parametrize("tp", [1, 2])
def test_log_probs_are_those_of_the_full_softmax_at_the_temperature(name: str, tp: int, directories: dict[str, Path]) -> None:
    """top-k and top-p choose the token but do not change the reported probability."""
    results = [_sampled(directories[name], 1)] if tp == 1 else run_ranks(2, _sampled, str(directories[name]), 2)
    texts = [text for text in prompts(4) for _ in range(2)]
    assert all(result == results[0] for result in results)
    for text, (answer, log_probs) in zip(texts, results[0], strict=True):
        expected = recomputed_log_probs(directories[name], text, answer, 0.7)
        torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), expected, atol=1e-4, rtol=0)


def test_greedy_reports_the_log_prob_at_temperature_one(directories: dict[str, Path]) -> None:
    (done,) = make_engine(directories["llama"]).generate(requests([(5, 6, 7)], temperature=0, max_tokens=8))
    expected = recomputed_log_probs(directories["llama"], (5, 6, 7), done.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(done.log_probs, dtype=torch.float64), expected, atol=1e-4, rtol=0)


def test_the_same_tokens_are_drawn_on_one_and_on_two_ranks(directories: dict[str, Path]) -> None:
    alone = [ids for ids, _ in _sampled(directories["qwen2"], 1)]
    assert [ids for ids, _ in run_ranks(2, _sampled, str(directories["qwen2"]), 2)[0]] == alone


def test_bf16_log_probs_stay_near_fp32(directories: dict[str, Path]) -> None:
    """bf16 keeps 8 bits: the log-probs of the bf16 engine's own tokens are near an fp32 recomputation, not equal to it."""
    texts = [text for text in prompts(4) for _ in range(2)]
    for text, (answer, log_probs) in zip(texts, _sampled(directories["llama"], 1, torch.bfloat16), strict=True):
        expected = recomputed_log_probs(directories["llama"], text, answer, 0.7)
        assert (torch.tensor(log_probs, dtype=torch.float64) - expected).abs().mean() < 0.3
