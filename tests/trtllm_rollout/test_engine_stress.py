"""Mixed work with everything at once: no wrong sample, no stale version, no leaked block, memory given back."""

from __future__ import annotations

import ctypes
import gc
import random
from pathlib import Path

import psutil
import pytest
import torch

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from tests.models import write_model
from tests.trtllm_rollout.engines import checksums, greedy_reference, make_engine, prompts, requests, tokens
from tests.trtllm_rollout.test_weights import load
from trtllm_rollout.embedded.engine import EmbeddedEngine
from trtllm_rollout.embedded.kv_cache import block_bytes
from trtllm_rollout.protocol import Completion, Request, SamplingParams

SIZE = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=101)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies, as different as random ones are."""
    return [write_model(tmp_path_factory.mktemp("model"), "qwen2", seed=seed, **SIZE) for seed in (1, 2)]


def _budget(engine: EmbeddedEngine, blocks: int, block_size: int) -> int:
    return blocks * block_bytes(engine._cache._heads, block_size, engine._cache.dtype)


def _small_engine(directory: Path, blocks: int, block_size: int = 8, **options: object) -> EmbeddedEngine:
    budget = _budget(make_engine(directory, version=None), blocks, block_size)
    return make_engine(directory, kv_cache_bytes=budget, block_size=block_size, **options)


def test_chunks_prefix_cache_and_preemption_leave_greedy_tokens_those_of_generate(versions: list[Path]) -> None:
    texts = [tuple(range(3, 3 + n)) for n in (40, 33, 7, 41, 60)]
    expected = greedy_reference(versions[0], texts, 30, stop=None)
    for options in (dict(max_batch_size=4, max_num_tokens=12), dict(max_batch_size=4, enable_prefix_cache=False), dict(max_batch_size=5)):
        engine = _small_engine(versions[0], 16, **options)
        for _ in range(2):
            assert [c.token_ids for c in engine.generate(requests(texts, temperature=0, max_tokens=30))] == expected
        stats = engine.stats()
        assert stats["preemptions"] > 0 and stats["recomputed_tokens"] > 0
        assert (stats["prefix_hit_rate"] > 0.3) == options.get("enable_prefix_cache", True)


def _crowded_and_alone(directory: Path, dtype: torch.dtype, longest: int = 20) -> None:
    """Log-probs too, which show a difference in any rounding."""
    work = requests([(5,) * 17 + t for t in prompts(5, vocab=100)], samples=3, max_tokens=longest)
    alone = [c for r in work for c in make_engine(directory, dtype=dtype, block_size=8, enable_prefix_cache=False).generate([r])]
    engine = _small_engine(directory, 20, dtype=dtype, max_batch_size=7, max_num_tokens=24)
    for _ in range(2):
        assert engine.generate(work) == alone
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_is_bit_for_bit_the_same_alone_crowded_put_back_and_behind_a_cached_beginning(dtype: torch.dtype, versions: list[Path]) -> None:
    _crowded_and_alone(versions[0], dtype)


SLOW_FAMILIES = [pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "qwen2_moe", "mixtral", "deepseek_v2", "glm4_moe")]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", *SLOW_FAMILIES])
def test_samples_of_other_families_too(family: str, tmp_path: Path) -> None:
    """Experts, latent attention, windows and sinks."""
    _crowded_and_alone(write_model(tmp_path / "model", family, seed=1), torch.float32, 10)


def test_a_request_that_the_cache_could_never_hold_is_refused_with_the_numbers(versions: list[Path]) -> None:
    engine = _small_engine(versions[0], 5)
    assert len(engine.generate(requests([(5,) * 16], max_tokens=24))[0].token_ids) == 24, "exactly full is allowed"
    with pytest.raises(UserError, match="take 6 blocks of 8, and the KV cache has 5.*kv_cache_bytes"):
        engine.generate(requests([(5,) * 17], max_tokens=24))
    with pytest.raises(UserError, match="kv_cache_bytes is 100; one block of 32 tokens takes"):
        make_engine(versions[0], kv_cache_bytes=100)
    with pytest.raises(UserError, match="max_num_tokens is 20.*at least 40"):
        make_engine(versions[0], max_num_tokens=20, max_batch_size=8)


def _requests(rng: random.Random, count: int, first: int) -> list[Request]:
    """Short and long, some with a common beginning, stops, cuts, and priorities."""
    out = []
    for number in range(first, first + count):
        text = (7,) * rng.choice((0, 0, 16, 19)) + tuple(rng.randrange(3, 100) for _ in range(rng.randint(1, 12)))
        sampling = SamplingParams(rng.choice((0, 0.7, 1.0)), rng.choice((0, 0, 5)), rng.choice((1.0, 0.9)), rng.randint(1, 12),
                                  stop_token_ids=(3, 4) if rng.random() < 0.5 else (), repetition_penalty=rng.choice((1.0, 1.0, 1.2)))
        out.append(Request(number, text, sampling, rng.choice((1, 1, 1, 2, 4)), (number,), priority=rng.randint(0, 2)))
    return out


def _mixed(versions: list[Path], count: int, seed: int) -> None:
    """Requests come while others run; some are aborted; now and then the engine sleeps or gets other weights, also in the middle."""
    rng = random.Random(seed)
    engine = _small_engine(versions[0], 40, max_batch_size=8, max_num_tokens=32, max_seq_len=64)
    loner = [make_engine(path, max_batch_size=1, max_seq_len=64, block_size=8, enable_prefix_cache=False) for path in versions]
    version, waiting, work, seen = 1, _requests(rng, count, 0), {}, []  # version v has the weights of versions[1 - v % 2]
    while waiting or work:
        if waiting and rng.random() < 0.6:
            new = [waiting.pop() for _ in range(min(len(waiting), rng.randint(1, 6)))]
            engine.submit(new)
            work |= {(r.request_id, k): r for r in new for k in range(r.samples)}
        if work and rng.random() < 0.04:
            engine.abort([rng.choice(list(work))[0]])
        if rng.random() < 0.05 and (rng.random() < 0.3 or not work):
            engine.begin_update()
            done = engine.step()
            seen += [(c, work.pop((c.request_id, c.sample)), version) for c in done]
            assert not work, "an update ends all work"
            if rng.random() < 0.5:
                engine.sleep(["kv_cache", "weights"])
                engine.wake(["kv_cache", "weights"])
            version += 1
            load(engine, versions[1 - version % 2])
            engine.commit(version, checksums(versions[1 - version % 2]))
        for c in engine.step():
            assert isinstance(c, Completion)
            seen.append((c, work.pop((c.request_id, c.sample)), version))
    assert len(seen) == len({(c.request_id, c.sample) for c, _, _ in seen})
    stats = engine.stats()
    assert (stats["kv_blocks_used"], stats["running_samples"], stats["waiting_samples"], stats["held_prompts"]) == (0, 0, 0, 0)
    assert version > 1 and {c.finish_reason for c, _, _ in seen} == {"stop", "length", "abort"}
    known: dict[tuple[int, int], dict[int, Completion]] = {}
    for c, request, of in seen:
        assert set(c.versions) <= {of}, "a token of stale weights"
        key = request.request_id, of % 2
        if key not in known:
            known[key] = {k.sample: k for k in loner[1 - of % 2].generate([request])}
        whole = known[key][c.sample]
        assert c.token_ids == whole.token_ids[:len(c.token_ids)] and c.log_probs == whole.log_probs[:len(c.token_ids)]
        assert c.finish_reason == "abort" or (c.token_ids, c.finish_reason) == (whole.token_ids, whole.finish_reason)


def test_mixed_work_with_aborts_priorities_sleeps_and_commits(versions: list[Path]) -> None:
    _mixed(versions, 150, seed=0)


@pytest.mark.slow
def test_10_000_mixed_requests(versions: list[Path]) -> None:
    _mixed(versions, 10_000, seed=1)


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def test_sleep_gives_back_the_memory_that_weights_and_cache_hold(tmp_path: Path) -> None:
    """Of the process, as the system counts it; at least 95 %, and waking gives the same answers."""
    directory = write_model(tmp_path / "model", "llama", seed=3, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, vocab_size=4000)
    model, work = ModelConfig.from_directory(directory), requests([(5, 6, 7)] * 8, samples=8, max_tokens=20)
    load(warm := EmbeddedEngine(model, torch.float32, max_batch_size=4, max_seq_len=32), directory)
    warm.commit(1)
    warm.generate(requests([(5, 6, 7)], max_tokens=2))  # what libraries keep for themselves is not the engine's
    del warm
    before = _resident()
    engine = EmbeddedEngine(model, torch.float32, max_batch_size=64, max_seq_len=128)
    load(engine, directory)
    engine.commit(1)
    first = tokens(engine.generate(work))
    held = _resident() - before
    bytes_held = engine.stats()["weights_bytes"]
    assert held > bytes_held > 100e6
    engine.sleep(["kv_cache", "weights"])
    assert _resident() - before < 0.05 * held, "more than 5 % is still resident"
    engine.wake(["kv_cache", "weights"])
    load(engine, directory)
    engine.commit(2)
    assert tokens(engine.generate(work)) == first
