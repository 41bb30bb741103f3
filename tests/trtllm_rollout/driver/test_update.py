"""Weights through the driver into TensorRT-LLM's workers: the model that computes there is the one that was synchronised, or nothing computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from resharding.errors import SyncError, WeightsError
from tests.models import reference_logits, write_model
from tests.trtllm_rollout.driver.api import Api, api, apis
from tests.trtllm_rollout.driver.harness import TARGET, running, sync, waiting_only
from tests.worker_pool import run_ranks
from trtllm_rollout.protocol import EngineRefuses, Request, SamplingParams

PROMPT = [5, 17, 99, 3]
SMALL = dict(num_hidden_layers=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("models")
    return {"llama": write_model(at / "llama", "llama", **SMALL), "tied": write_model(at / "tied", "qwen2", tie_word_embeddings=True, **SMALL),
            "moe": write_model(at / "moe", "qwen3_moe", **SMALL)}


def same_logits(cluster: Any, directory: Path) -> bool:
    return torch.allclose(cluster.logits(PROMPT), reference_logits(directory, [PROMPT])[0], atol=1e-5)


@pytest.mark.parametrize("version", apis(), ids=lambda a: f"{a.version}-{len(a.arguments)}")
def test_every_version_computes_the_source_after_a_sync(models: dict[str, Path], version: Api) -> None:
    with running(models["llama"], version) as (engine, cluster):
        assert not same_logits(cluster, models["llama"])
        sync(engine, models["llama"])
        assert engine.version == 1 and same_logits(cluster, models["llama"])
        assert [len(c.token_ids) for c in engine.generate([Request(0, tuple(PROMPT), SamplingParams(max_tokens=3))])] == [3]


@pytest.mark.parametrize("weights", ["rank_local", "public"])
@pytest.mark.parametrize("name", ["llama", "tied", "moe"])
def test_both_ways_bring_the_same_weights(models: dict[str, Path], name: str, weights: str) -> None:
    with running(models[name], weights=weights, bucket_mb=1) as (engine, cluster):
        sync(engine, models[name])
        assert same_logits(cluster, models[name])
        assert ("mcore_rl_public" in cluster.calls) == (weights == "public")


def _tensor_parallel(directory: str, weights: str, moe_ep: int, fake: dict[str, Any]) -> tuple[bool, list[str], list[tuple[int, ...]]]:
    with running(directory, tp=2, moe_ep=moe_ep, fake=fake, weights=weights) as (engine, cluster):
        sync(engine, directory)
        done = engine.generate([Request(0, tuple(PROMPT), SamplingParams(temperature=0, max_tokens=4), samples=2)])
        good = same_logits(cluster, Path(directory)) if cluster.workers else True
        return good, cluster.calls, [c.token_ids for c in done]


@pytest.mark.parametrize(("name", "weights", "moe_ep", "fake"), [
    ("llama", "rank_local", 1, {}), ("llama", "public", 1, {"order": (1, 0)}), ("moe", "rank_local", 2, {"order": (1, 0)}),
    ("moe", "public", 2, {}), ("moe", "auto", 1, {"backend": "backend."})])
def test_two_ranks_feed_two_workers_wherever_they_sit(models: dict[str, Path], name: str, weights: str, moe_ep: int, fake: dict[str, Any]) -> None:
    """`order`: the worker on the GPU of rank 0 is tp rank 1. 203 rows of vocabulary do not divide: the last slice is shorter."""
    (good, calls, tokens), (_, others, same) = run_ranks(2, _tensor_parallel, str(models[name]), weights, moe_ep, fake)
    assert good and tokens == same and calls and not others
    assert tokens[0] == tokens[1] and len(tokens[0]) == 4


def test_a_second_sync_forgets_prefixes_and_replaces_everything(models: dict[str, Path]) -> None:
    with running(models["llama"]) as (engine, cluster):
        sync(engine, models["llama"])
        request = [Request(0, tuple(PROMPT), SamplingParams(temperature=0, max_tokens=1))]
        first = engine.generate(request)[0]
        assert cluster.prefixes
        sync(engine, models["llama"], 2, scale=0.5)
        assert not cluster.prefixes and not same_logits(cluster, models["llama"])
        second = engine.generate(request)[0]
        assert (first.versions, second.versions) == ((1,), (2,)) and second.log_probs != first.log_probs


def test_a_name_that_is_lost_on_the_way_is_found(models: dict[str, Path]) -> None:
    """TensorRT-LLM keeps the old value and says nothing; what is read back from the parameters does not add up."""
    with running(models["llama"], weights="public", fake={"lose": {"model.layers.1.self_attn.k_proj.weight"}}) as (engine, _):
        with pytest.raises((WeightsError, SyncError), match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
            sync(engine, models["llama"])
        with pytest.raises(EngineRefuses, match="update is under way"):
            engine.generate([Request(0, (1,))])


def test_a_worker_on_no_rank_s_gpu_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"\['7'\].*\['0'\].*one worker"), running(models["llama"], fake={"uuids": ("GPU-7",)}):
        pass


@pytest.mark.parametrize("weights", ["auto", "public"])
def test_a_model_that_takes_no_part_is_reloaded_whole(models: dict[str, Path], weights: str) -> None:
    """As DeepSeek-V3: in one call with every tensor. `auto` goes past the loader where the parameters are known."""
    with running(models["llama"], fake={"partial": False}, weights=weights) as (engine, cluster):
        sync(engine, models["llama"])
        assert same_logits(cluster, models["llama"])
        assert cluster.calls.count("mcore_rl_whole") == (weights == "public")


def test_rank_local_is_refused_by_name_where_parameters_are_derived(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama", **SMALL)
    with running(directory, fake={"backend": "", "partial": True}) as (engine, cluster):
        cluster.workers[0].engine.model_engine.model._put("model.layers.0.extra", torch.nn.Parameter(torch.zeros(2)))
        with pytest.raises(Exception, match=r"no canonical tensor goes into model\.layers\.0\.extra"):
            sync(engine, directory)


def test_a_step_that_comes_twice_is_made_once_and_a_lost_one_is_found(models: dict[str, Path]) -> None:
    with running(models["llama"]) as (engine, cluster):
        sync(engine, models["llama"])
        worker = cluster.workers[0]
        before = worker._mcore_rl_step
        worker.mcore_rl_rank_local(before, {}, {})  # would fail: nothing was sent for this GPU
        with pytest.raises(WeightsError, match="one was lost"):
            worker.mcore_rl_public((before[0], before[1] + 2), None)
        with pytest.raises(WeightsError, match="nothing was sent for GPU GPU-0"):
            worker.mcore_rl_rank_local((before[0] + 1, 1), {}, {})


def test_a_silent_worker_ends_the_update_with_what_was_waited_for(models: dict[str, Path]) -> None:
    with running(models["llama"], fake={"silent": {"mcore_rl_rank_local"}}) as (engine, cluster):
        with waiting_only(engine, update_timeout_s=2.0), \
                pytest.raises(SyncError, match="waited 2 s for TensorRT-LLM to copy the shards into the parameters"):
            sync(engine, models["llama"])
        assert engine.version is None
        cluster.silent.clear()
        sync(engine, models["llama"], 2)
        assert engine.version == 2 and same_logits(cluster, models["llama"])


@pytest.mark.parametrize("version", [api("1.2.1"), TARGET], ids=lambda a: a.version)
def test_sleep_frees_and_waking_weights_need_a_sync(models: dict[str, Path], version: Api) -> None:
    request = [Request(0, tuple(PROMPT), SamplingParams(max_tokens=2))]
    with running(models["llama"], version) as (engine, cluster):
        sync(engine, models["llama"])
        engine.generate(request)
        engine.sleep(["kv_cache", "weights"])
        assert cluster.asleep == {"kv_cache", "model" if version.sleep == "enable_sleep" else "model_weights"} and not cluster.prefixes
        with pytest.raises(EngineRefuses, match="asleep"):
            engine.generate(request)
        engine.wake(["weights"])
        with pytest.raises(EngineRefuses, match="write them and commit"):
            engine.generate(request)
        sync(engine, models["llama"], 2)
        with pytest.raises(EngineRefuses, match="kv_cache asleep"):
            engine.generate(request)
        engine.wake(["kv_cache"])
        assert same_logits(cluster, models["llama"]) and engine.generate(request)[0].versions == (2, 2)
        with pytest.raises(UserError, match="did you mean 'weights'"):
            engine.sleep(["weight"])


def test_memory_of_a_shard_is_there_for_an_update_only(models: dict[str, Path]) -> None:
    with running(models["llama"]) as (engine, _):
        staging = engine._owner.staging
        assert staging.nbytes == 0
        assert sum(t.untyped_storage().nbytes() for t in engine.weights().values()) == engine.layouts[0].nbytes
        engine._owner.staging.empty()
        sync(engine, models["llama"])
        assert staging.nbytes == 0
