"""The engine protocol on TensorRT-LLM: abort, streaming, updates under way, timeouts, the end; and the executor inside the process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from tests.models import reference_logits, write_model
from tests.trtllm_rollout.driver.api import api
from tests.trtllm_rollout.driver.harness import running, sync, waiting_only
from tests.worker_pool import run_ranks
from trtllm_rollout.protocol import Completion, EngineRefuses, Progress, Request, SamplingParams

PROMPT = (5, 17, 99, 3)
LONG = SamplingParams(max_tokens=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "llama", "llama", num_hidden_layers=2)


def test_nothing_is_generated_before_a_commit_and_bad_requests_are_refused(model: Path) -> None:
    with running(model) as (engine, cluster):
        with pytest.raises(EngineRefuses, match="no weights version is committed"):
            engine.generate([Request(0, PROMPT)])
        sync(engine, model)
        for request, words in ((Request(1, (500,)), "outside the vocabulary"), (Request(1, PROMPT, SamplingParams(max_tokens=999)), "exceed"),
                               (Request(1, PROMPT, SamplingParams(min_p=0.5)), "min_p")):
            with pytest.raises(UserError, match=words):
                engine.submit([request])
        assert "generate_async" not in cluster.calls


def test_samples_do_not_depend_on_company_and_come_in_order(model: Path) -> None:
    with running(model) as (engine, _):
        sync(engine, model)
        many = engine.generate([Request(i, PROMPT, SamplingParams(max_tokens=4), 3, (7, i)) for i in (8, 2)])
        alone = engine.generate([Request(2, PROMPT, SamplingParams(max_tokens=4), 3, (7, 2))])
        assert [(c.request_id, c.sample) for c in many] == [(8, 0), (8, 1), (8, 2), (2, 0), (2, 1), (2, 2)] and many[3:] == alone
        stats = engine.stats()
        assert stats["tokens"] == 36 and stats["running_samples"] == 0 and stats["tokens_per_second"] > 0


def test_tokens_come_as_they_are_made(model: Path) -> None:
    with running(model) as (engine, _):
        sync(engine, model)
        engine.submit([Request(0, PROMPT, SamplingParams(max_tokens=5), every_token=True)])
        told: list[Progress | Completion] = []
        while part := engine.step():
            told += part
        *progress, done = told
        assert isinstance(done, Completion) and all(isinstance(p, Progress) for p in progress)
        assert sum((p.token_ids for p in progress), ()) == done.token_ids and sum((p.log_probs for p in progress), ()) == done.log_probs
        assert engine.step() == []


def test_abort_ends_a_request_and_an_update_ends_all(model: Path) -> None:
    with running(model, fake={"hold": True}) as (engine, cluster):
        sync(engine, model)
        engine.submit([Request(0, PROMPT, LONG), Request(1, PROMPT, LONG)])
        engine.abort([0])
        assert engine.step() == [Completion(0, 0, (), (), (), "abort")]  # TensorRT-LLM had not heard of it
        engine._ranks.first(lambda: engine._serve_new())
        engine.submit([Request(0, PROMPT, LONG)])  # the id is free again
        engine.abort([1])
        assert [(c.request_id, c.finish_reason) for c in engine.step()] == [(1, "abort")]
        sync(engine, model, 2)  # asserts there that the queue was drained
        assert [(c.request_id, c.finish_reason) for c in engine.stream()] == [(0, "abort")]
        assert cluster.active == 0 and engine.version == 2


def test_pause_is_used_where_the_build_has_it(model: Path) -> None:
    for version, expected in (("1.3.0rc10", []), ("1.3.0rc15", ["pause_generation", "resume_generation"])):
        with running(model, api(version)) as (engine, cluster):
            sync(engine, model)
            assert [c for c in cluster.calls if c.endswith("_generation")] == expected


def test_waiting_for_a_sample_ends_with_what_was_waited_for(model: Path) -> None:
    with running(model, fake={"hold": True}) as (engine, cluster):
        sync(engine, model)
        with waiting_only(engine, generate_timeout_s=0.1), \
                pytest.raises(EngineRefuses, match=r"waited 0\.1 s for TensorRT-LLM to finish a sample.*generate_timeout_s"):
            engine.generate([Request(0, PROMPT, LONG)])
        with pytest.raises(EngineRefuses, match="waited"):  # until the next update
            engine.generate([Request(0, PROMPT, LONG)])
        cluster.hold = False
        sync(engine, model, 2)
        [done] = engine.generate([Request(0, PROMPT, SamplingParams(max_tokens=2))])
        assert (len(done.token_ids), done.finish_reason) == (2, "length")  # not the late news of the one that was given up


def test_a_failure_there_ends_the_work_here(model: Path) -> None:
    with running(model) as (engine, cluster):
        sync(engine, model)
        cluster.asleep.add("kv_cache")  # behind the driver's back
        with pytest.raises(EngineRefuses, match=r"request 0, sample 0: TensorRT-LLM failed: .*asleep"):
            engine.generate([Request(0, PROMPT)])
        with pytest.raises(EngineRefuses):
            engine.generate([Request(0, PROMPT)])


def test_start_times_out_and_leaves_nothing_behind(model: Path) -> None:
    with pytest.raises(EngineRefuses, match="waited 0.2 s for TensorRT-LLM to start its workers and load the model"), \
            running(model, start_timeout_s=0.2, fake={"silent": {"setup_async"}}):
        pass
    assert not [t for t in threading.enumerate() if t.name == "tensorrt_llm"]


def test_close_ends_the_workers_once(model: Path) -> None:
    with running(model) as (engine, cluster):
        engine.close()
        engine.close()
        assert cluster.down and cluster.calls.count("shutdown") == 1 and cluster.calls[-1] == "ray.shutdown"


def _disagree(directory: str) -> list[str]:
    import torch.distributed as dist

    with running(directory, tp=2) as (engine, _):
        sync(engine, directory)
        out = []
        for requests in ([Request(dist.get_rank(), PROMPT)], [Request(9, (500,))] if dist.get_rank() else [Request(9, PROMPT)]):
            try:
                engine.generate(requests)
            except (EngineRefuses, UserError) as error:
                out.append(str(error))
                break
        return out


def test_ranks_that_submit_different_work_all_refuse(model: Path) -> None:
    texts = run_ranks(2, _disagree, str(model))
    assert all("requests differ" in text for [text] in texts)


# the executor inside the process


def same_logits(cluster: Any, directory: Path) -> bool:
    return torch.allclose(cluster.logits(PROMPT), reference_logits(directory, [list(PROMPT)])[0], atol=1e-5)


def test_inside_the_process_the_plan_writes_into_the_parameters(model: Path) -> None:
    with running(model, owner="inprocess") as (engine, cluster):
        parameters = {p.data_ptr() for p in cluster.shards()[0].parameters()}
        assert {t.data_ptr() for t in engine.weights().values()} == parameters
        sync(engine, model)
        assert same_logits(cluster, model)
        request = [Request(0, PROMPT, SamplingParams(temperature=0, max_tokens=2))]
        first = engine.generate(request)
        assert cluster.prefixes
        sync(engine, model, 2, scale=0.5)
        assert not cluster.prefixes and engine.generate(request)[0].log_probs != first[0].log_probs
        engine.sleep(["kv_cache", "weights"])
        assert cluster.asleep == {"kv_cache", "model_weights"}
        engine.wake(["kv_cache", "weights"])
        with pytest.raises(EngineRefuses, match="write them and commit"):
            engine.generate(request)
        sync(engine, model, 3)
        assert same_logits(cluster, model) and engine.generate(request)[0].versions == (3, 3)


@pytest.mark.parametrize(("version", "changes", "words"), [
    ("1.3.0rc21", {}, "were read in tensorrt_llm 1.3.0rc10 to 1.3.0rc15, not in 1.3.0rc21"),
    ("1.3.0rc15", {"weights": "public"}, "weights is public with owner inprocess")])
def test_inside_the_process_what_was_not_read_is_refused(model: Path, version: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words), running(model, api(version), owner="inprocess", **changes):
        pass


def _without_mpi(directory: str) -> str:
    try:
        with running(directory, tp=2, owner="inprocess"):
            return "started"
    except UserError as error:
        return str(error)


def test_inside_the_process_two_ranks_need_a_launcher_that_mpi_knows(model: Path) -> None:
    assert all("MPI sees 1 ranks of 2; start with mpirun or srun" in text for text in run_ranks(2, _without_mpi, str(model)))
