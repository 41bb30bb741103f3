"""The engine computes what transformers computes: greedy tokens and log-probs, alone and tensor parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.rollout import check_engine_size
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from tests.models import FAMILY_TINY, LLAMA3_ROPE, TINY, YARN, write_model
from tests.trtllm_rollout.engines import greedy_reference, make_engine, prompts, recomputed_log_probs, requests
from tests.worker_pool import run_ranks
from trtllm_rollout.embedded.engine import EmbeddedEngine

MODELS = {
    "llama": dict(family="llama"),
    "llama tied": dict(family="llama", tie_word_embeddings=True),
    "llama with llama3 rope": dict(family="llama", rope_parameters=LLAMA3_ROPE),
    "llama with its own head_dim": dict(family="llama", head_dim=32),
    "qwen2": dict(family="qwen2"),
    "qwen2 tied": dict(family="qwen2", tie_word_embeddings=True),
    "qwen3": dict(family="qwen3"),
    "mistral": dict(family="mistral", sliding_window=None),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name.replace(" ", "_"), seed=i, **options) for i, (name, options) in enumerate(MODELS.items())}


def _greedy(directory: str, texts: list[tuple[int, ...]], max_tokens: int, stop: tuple[int, ...], tp: int,
            max_batch_size: int) -> list[tuple[int, ...]]:
    engine = make_engine(directory, tp=tp, max_batch_size=max_batch_size)
    done = engine.generate(requests(texts, temperature=0, max_tokens=max_tokens, stop_token_ids=stop))
    return [c.token_ids for c in done]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_generate(name: str, directories: dict[str, Path]) -> None:
    """Ragged prompts, more of them than fit the batch, positions beyond the original context of llama3 rope."""
    texts = prompts(7, longest=90)
    expected = greedy_reference(directories[name], texts, 20, stop=None)
    assert _greedy(directories[name], texts, 20, (), tp=1, max_batch_size=3) == expected


@pytest.mark.parametrize("name", ["llama", "llama with llama3 rope", "qwen2 tied", "qwen3"])
def test_greedy_tokens_are_those_of_generate_on_two_ranks(name: str, directories: dict[str, Path]) -> None:
    texts = prompts(6, longest=70)
    expected = greedy_reference(directories[name], texts, 16, stop=5)
    for of_rank in run_ranks(2, _greedy, str(directories[name]), texts, 16, (5,), tp=2, max_batch_size=4):
        assert of_rank == expected


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("mistral", {}, "sliding window of 5"), ("qwen3_moe", {}, "experts"), ("deepseek_v3", {}, "latent attention"), ("gpt_oss", {}, "attention sinks"),
    ("llama", dict(rope_parameters=YARN), "YaRN")])
def test_models_with_parts_it_lacks_are_refused_by_name(family: str, changes: dict[str, Any], words: str) -> None:
    model = ModelConfig.from_hf({"model_type": family, **TINY, **FAMILY_TINY[family], **changes})
    with pytest.raises(UserError, match=f"{family}.*{words}"):
        EmbeddedEngine(model, torch.float32)
    with pytest.raises(UserError, match=f"{family}.*{words}"):  # what `mcore-rl train` and `generate` ask before anything is built
        check_engine_size(1, 1, model)


def test_key_value_heads_are_repeated_where_tp_exceeds_them(directories: dict[str, Path]) -> None:
    """tp 4 over 2 key-value heads, and a vocabulary of 203 that 4 does not divide."""
    texts = prompts(5)
    expected = greedy_reference(directories["llama"], texts, 12, stop=None)
    assert run_ranks(4, _greedy, str(directories["llama"]), texts, 12, (), tp=4, max_batch_size=8) == [expected] * 4


def test_greedy_of_a_trained_model(stories260k: Path | None, directories: dict[str, Path]) -> None:
    directory = stories260k or directories["llama"]
    texts = [(1,), (1, 100, 60), tuple(range(1, 40))]
    assert _greedy(directory, texts, 60, (), tp=1, max_batch_size=4) == greedy_reference(directory, texts, 60, stop=None)


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
