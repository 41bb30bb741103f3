"""A tensorrt_llm without a GPU: strict about names, faithful about what an update needs, and as silent as the real one where that is.

`fake_tensorrt_llm(api, ...)` puts it in place of the package; the `Cluster` that it yields holds what the workers hold, and takes faults.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import enum
import importlib
import json
import pickle
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

from tests.trtllm_rollout.driver.api import Api
from tests.trtllm_rollout.driver.fake_model import Shard, reassembled, transformers_model


@dataclass
class Cluster:
    """The workers of one engine and what a test may do to them. `calls`: methods that were called on the engine, in order."""

    api: Api
    uuids: tuple[str, ...] = ("GPU-0",)
    partial: bool = True
    backend: str = ""  # upstream's wrapper of the expert module
    keep_on_release: bool = False
    hold: bool = False  # samples go on until they are aborted
    silent: set[str] = field(default_factory=set)  # calls that never answer
    lose: set[str] = field(default_factory=set)  # names that a bucket loses on its way
    neighbours: bool = True  # log-probs of the likeliest token come before those of the drawn one
    cut_stops: bool = False  # the stop token is left out of the sample
    order: tuple[int, ...] = ()  # tp rank of each worker; (): in order
    workers: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    sampling: list[Any] = field(default_factory=list)
    asleep: set[str] = field(default_factory=set)
    prefixes: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    active: int = 0
    paused: bool = False
    down: bool = False
    _model: tuple[Any, Any] = (None, None)

    def model(self) -> Any:
        """transformers on what the workers hold now."""
        shards = self.shards()
        key = [(p.data_ptr(), p._version) for s in shards for p in (*s.parameters(), s.derived)]
        if self._model[0] != key:
            self._model = key, transformers_model(shards[0].hf, reassembled(shards))
        return self._model[1]

    def shards(self) -> list[Shard]:
        return [w.engine.model_engine.model for w in self.workers]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab] of what the workers hold now."""
        with torch.no_grad():
            return self.model()(torch.tensor([list(ids)])).logits[0]


def strict(what: str, names: Sequence[str], given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in names:
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    generation_logits: torch.Tensor | None = None


class Result:
    """A RequestOutput: awaited, or iterated where streaming."""

    def __init__(self, cluster: Cluster, ids: list[int], sampling: Any, streaming: bool) -> None:
        self.cluster, self.ids, self.s, self.streaming = cluster, ids, sampling, streaming
        self.outputs = [CompletionOutput([], [])]
        self.finished = self._aborted = False
        cluster.active += 1

    def abort(self) -> None:
        self._aborted = True

    def __await__(self) -> Iterator[Any]:
        return self._run().__await__()

    async def _run(self) -> Result:
        async for _ in self._parts():
            pass
        return self

    def __aiter__(self) -> Any:
        assert self.streaming, "only streaming results can be iterated"
        return self._parts()

    async def _parts(self) -> Any:
        c, s, out = self.cluster, self.s, self.outputs[0]
        try:
            assert not c.asleep, f"{sorted(c.asleep)} asleep"
            model = c.model()
            generator = torch.Generator().manual_seed(s["seed"] or 0)
            greedy = s["top_k"] == 1 or s["temperature"] is None and s["top_p"] is None and s["top_k"] is None
            rows, logits = [], None
            if s["prompt_logprobs"] is not None:
                with torch.no_grad():
                    prompt = torch.log_softmax(model(torch.tensor([self.ids])).logits[0], -1)
                out.prompt_logprobs = [{}, *({t: Logprob(float(p[t]))} for t, p in zip(self.ids[1:], prompt))]
            while out.finish_reason is None:
                await asyncio.sleep(0)
                if self._aborted:
                    out.finish_reason = "cancelled"
                    break
                if c.hold:
                    await asyncio.sleep(0.001)
                    continue
                with torch.no_grad():
                    logits = c.prefixes.get(tuple(self.ids)) if not out.token_ids else None
                    if logits is None:
                        logits = model(torch.tensor([[*self.ids, *out.token_ids]])).logits[0, -1].double()
                    if not out.token_ids:
                        c.prefixes[tuple(self.ids)] = logits
                self._draw(out, logits, greedy, generator)
                rows.append(logits)
                if self.streaming and out.finish_reason is None:
                    yield self
            if s["return_generation_logits"] and rows:
                out.generation_logits = torch.stack(rows)
        finally:
            c.active -= 1
        self.finished = True
        if self.streaming:
            yield self

    def _draw(self, out: CompletionOutput, logits: torch.Tensor, greedy: bool, generator: torch.Generator) -> None:
        s, cpp = self.s, self.cluster.arguments["sampler_type"] == "TRTLLMSampler"
        scaled = logits / (s["temperature"] or 1.0)
        probabilities = torch.softmax(scaled, -1)
        if s["top_k"]:
            probabilities = torch.where(probabilities >= probabilities.topk(s["top_k"]).values[-1], probabilities, 0.0)
        if s["top_p"] is not None and s["top_p"] < 1:
            ordered = probabilities.sort(descending=True)
            beyond = ordered.values.cumsum(-1) - ordered.values >= s["top_p"] * ordered.values.sum()
            probabilities[ordered.indices[beyond]] = 0.0
        token = int(logits.argmax()) if greedy else int(torch.multinomial(probabilities, 1, generator=generator))
        reported = torch.log_softmax(scaled if cpp else logits, -1)
        many = 0 if cpp else s["logprobs"]
        best = reported.topk(max(many, 1)).indices.tolist() if many or self.cluster.neighbours else []
        ended_by_end = token == s["end_id"]
        stopped = ended_by_end or token in (s["stop_token_ids"] or ())
        keep = not (stopped and (self.cluster.cut_stops or (cpp and ended_by_end) or not ended_by_end and not s["include_stop_str_in_output"]))
        if keep:
            out.token_ids.append(token)
            out.logprobs.append({t: Logprob(float(reported[t])) for t in dict.fromkeys([*best, token])})
        if stopped:
            out.finish_reason = "stop"
        elif len(out.token_ids) >= s["max_tokens"]:
            out.finish_reason = "length"


class PyExecutor:
    """`control_action` waits for the queue to drain; here a request under way there is the driver's fault."""

    def __init__(self, cluster: Cluster, shard: Shard) -> None:
        self.cluster = cluster
        self.dist = types.SimpleNamespace(mapping=types.SimpleNamespace(tp_rank=shard.r))
        loader = types.SimpleNamespace(reload=self._reload)
        self.model_engine = types.SimpleNamespace(model=shard, model_loader=loader)

    @contextmanager
    def control_action(self) -> Iterator[None]:
        assert self.cluster.active == 0, f"an update while {self.cluster.active} requests are under way"
        yield

    def reset_prefix_cache(self) -> None:
        self.cluster.prefixes.clear()

    def _reload(self, model: Shard, weights: Mapping[str, torch.Tensor], allow_partial_loading: bool = False) -> None:
        import inspect

        if "allow_partial_loading" in inspect.signature(model.load_weights).parameters:
            model.load_weights(weights, allow_partial_loading=allow_partial_loading)
        else:
            assert allow_partial_loading is False, "the model does not support partial loading"
            model.load_weights(weights)


def controlled(method: Any) -> Any:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.control_action():
            return method(self, *args, **kwargs)

    return wrapper


class WorkerExtension:
    @controlled
    def update_weights(self, ipc_handles: Mapping[str, Any] | None = None) -> None:
        engine = self.engine  # type: ignore[attr-defined]
        if ipc_handles is None:
            for module in engine.model_engine.model.modules():
                if hasattr(module, "post_load_weights"):
                    module.post_load_weights()
            engine.reset_prefix_cache()
            return
        uuid = self.uuid  # type: ignore[attr-defined]
        if uuid not in ipc_handles:
            raise ValueError(f"Device UUID {uuid} not found in ipc_handles")
        handles = ipc_handles[uuid]
        if isinstance(handles, str):
            handles = pickle.loads(base64.b64decode(handles))
        assert isinstance(handles, list)
        weights = {name: rebuild(*arguments) for name, (rebuild, arguments) in handles if name not in engine.cluster.lose}
        engine.model_engine.model_loader.reload(engine.model_engine.model, weights, allow_partial_loading=True)


class RayGPUWorker:
    def __init__(self, cluster: Cluster, device_id: int, shard: Shard) -> None:
        self.device_id, self.uuid, self.engine = device_id, cluster.uuids[device_id], PyExecutor(cluster, shard)

    def sleep(self, sleep_tags: list[str]) -> None:
        self._memory(sleep_tags, True)

    def wakeup(self, wakeup_tags: list[str]) -> None:
        self._memory(wakeup_tags, False)

    def _memory(self, tags: list[str], free: bool) -> None:
        cluster = self.engine.cluster
        if unknown := set(tags) - set(cluster.api.tags.values()):
            raise ValueError(f"Unknown memory tag {unknown}")
        if not (cluster.arguments.get("enable_sleep") or cluster.arguments.get("sleep_config")):
            raise ValueError("Sleep feature is not enabled")
        with self.engine.control_action():
            if free and set(tags) & {"model", "model_weights"} and not cluster.keep_on_release:
                for parameter in self.engine.model_engine.model.parameters():
                    parameter.fill_(float("nan"))


def make_shards(cluster: Cluster, directory: str, arguments: Mapping[str, Any]) -> list[Shard]:
    hf = json.loads(Path(directory, "config.json").read_text())
    if hf["model_type"] == "qwen3_moe":
        hf["num_experts"] = hf.get("num_experts") or hf["num_local_experts"]
    tp, ep = arguments["tensor_parallel_size"], arguments.get("moe_expert_parallel_size") or 1
    dtype = getattr(torch, arguments["dtype"])
    return [Shard(hf, tp, r, ep, dtype, cluster.partial, cluster.backend) for r in (cluster.order or range(tp))]


def check_arguments(api: Api, arguments: Mapping[str, Any]) -> None:
    """As pydantic's extra="forbid", and the rules of TorchLlmArgs that the driver could break."""
    if unknown := sorted(arguments.keys() - api.arguments):
        raise ValueError(f"Extra inputs are not permitted: {unknown}")
    assert arguments["load_format"].upper() in ("AUTO", "DUMMY") and arguments["sampler_type"] in ("auto", "TorchSampler", "TRTLLMSampler")
    moe = arguments.get("moe_tensor_parallel_size", -1), arguments.get("moe_expert_parallel_size", -1)
    assert moe == (-1, -1) or moe[0] * moe[1] == arguments["tensor_parallel_size"]


def make_async_llm(cluster: Cluster) -> type:
    api = cluster.api

    class AsyncLLM:
        def __init__(self, placement_groups: Any = None, placement_bundle_indices: Any = None, per_worker_gpu_share: Any = None,
                     **kwargs: Any) -> None:
            assert placement_groups is None, "the first positional is not the model"
            check_arguments(api, kwargs)
            cluster.arguments = kwargs
            module, name = kwargs["ray_worker_extension_cls"].rsplit(".", 1)
            extension = getattr(importlib.import_module(module), name)
            for attribute in dir(extension):
                if not attribute.startswith("__") and hasattr(RayGPUWorker, attribute):
                    raise ValueError(f"Worker class already defines {attribute!r}")
            kind = type("RayGPUWorkerWithExtension", (RayGPUWorker, extension), {})
            cluster.workers = [kind(cluster, i, shard) for i, shard in enumerate(make_shards(cluster, kwargs["model"], kwargs))]

        def _called(self, method: str, given: Mapping[str, Any]) -> None:
            assert method in api.methods, f"AsyncLLM of {api.version} has no {method}"
            strict(f"AsyncLLM.{method}()", api.methods[method], given)
            cluster.calls.append(method)

        async def _answer(self, method: str) -> None:
            while method in cluster.silent:
                await asyncio.sleep(0.001)

        def generate_async(self, **given: Any) -> Result:
            self._called("generate_async", given)
            assert isinstance(given["inputs"], list) and all(type(i) is int for i in given["inputs"]), "one prompt is a flat list of int"
            return Result(cluster, given["inputs"], given["sampling_params"], given.get("streaming", False))

        async def collective_rpc(self, **given: Any) -> list[Any]:
            self._called("collective_rpc", given)
            cluster.calls.append(given["method"])
            await self._answer(given["method"])
            return [getattr(worker, given["method"])(*given.get("args", ()), **(given.get("kwargs") or {})) for worker in cluster.workers]

        async def release(self, **given: Any) -> None:
            self._called("release", given)
            for worker in cluster.workers:
                worker.sleep(given["tags"])
            cluster.asleep.update(given["tags"])

        async def resume(self, **given: Any) -> None:
            self._called("resume", given)
            for worker in cluster.workers:
                worker.wakeup(given["tags"])
            cluster.asleep.difference_update(given["tags"])

        async def setup_async(self) -> None:
            self._called("setup_async", {})
            await self._answer("setup_async")

        def shutdown(self) -> None:
            self._called("shutdown", {})
            cluster.down = True

        if api.pause:
            async def pause_generation(self) -> None:
                self._called("pause_generation", {})
                cluster.paused = True

            async def resume_generation(self) -> None:
                self._called("resume_generation", {})
                cluster.paused = False

    return AsyncLLM


def make_sampling_params(api: Api, cluster: Cluster) -> type:
    """Strict about names, as the dataclass is; values are read by name."""
    names = sorted(api.sampling)

    def __getitem__(self: Any, name: str) -> Any:
        return getattr(self, name)

    def __post_init__(self: Any) -> None:
        assert self.top_p is None or 0 < self.top_p <= 1, "top_p"
        assert self.top_k is None or self.top_k >= 0, "top_k"
        assert self.temperature is None or self.temperature > 0, "temperature"
        assert self.end_id is not None and self.pad_id is not None and self.detokenize is False, "without a tokenizer"
        cluster.sampling.append(self)

    return dataclasses.make_dataclass("SamplingParams", [(n, Any, field(default={"max_tokens": 32, "n": 1, "detokenize": True}.get(n)))
                                                         for n in names], kw_only=True,
                                      namespace={"__getitem__": __getitem__, "__post_init__": __post_init__})


def keywords(name: str, *names: str) -> Any:
    def make(**given: Any) -> Any:
        strict(name, names, given)
        return types.SimpleNamespace(**given)

    return make


def make_executor_worker(cluster: Cluster) -> type:
    class GenerationExecutorWorker:
        """One per rank, as upstream's `worker_main` makes them. `cluster.order` says which tp rank this process is."""

        def __init__(self, engine: Any, hf_model_dir: Any = None, llm_args: Any = None, tokenizer: Any = None,
                     is_llm_executor: bool | None = None) -> None:
            cluster.arguments = vars(llm_args)
            [shard] = make_shards(cluster, str(hf_model_dir), cluster.arguments)
            self.engine = PyExecutor(cluster, shard)
            cluster.workers = [self]

        def generate_async(self, prompt_token_ids: list[int], sampling_params: Any, streaming: bool = False) -> Result:
            return Result(cluster, prompt_token_ids, sampling_params, streaming)

        def shutdown(self) -> None:
            cluster.down = True

    return GenerationExecutorWorker


@contextmanager
def fake_tensorrt_llm(api: Api, **options: Any) -> Iterator[Cluster]:
    cluster = Cluster(api, **options)
    memory = enum.Enum("ExecutorMemoryType", api.tags)
    sampling = make_sampling_params(api, cluster)
    llm = make_async_llm(cluster)

    def llm_args(**given: Any) -> Any:
        check_arguments(api, given)
        return types.SimpleNamespace(**given)

    llm_args.model_fields = dict.fromkeys(api.arguments)  # type: ignore[attr-defined]
    llmapi = {"AsyncLLM": llm, "SamplingParams": sampling, "TorchLlmArgs": llm_args, "MoeConfig": keywords("MoeConfig", "backend"),
              "KvCacheConfig": keywords("KvCacheConfig", "enable_block_reuse", "free_gpu_memory_fraction", "max_tokens", "dtype"),
              "SchedulerConfig": keywords("SchedulerConfig", "capacity_scheduler_policy"),
              "CapacitySchedulerPolicy": enum.Enum("CapacitySchedulerPolicy", ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"]),
              "CudaGraphConfig": keywords("CudaGraphConfig", "enable_padding", "max_batch_size", "batch_sizes")}
    modules: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {"__version__": api.version, "LLM": llm, "AsyncLLM": llm, "SamplingParams": sampling}, "tensorrt_llm.llmapi": llmapi,
        "tensorrt_llm.llmapi.llm_args": {"TorchLlmArgs": llm_args}, "tensorrt_llm.llmapi.rlhf_utils": {"WorkerExtension": WorkerExtension},
        "tensorrt_llm.sampling_params": {"SamplingParams": sampling}, "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.utils": {"get_device_uuid": lambda device_id: cluster.uuids[device_id]},
        "tensorrt_llm._torch.virtual_memory": {"release_with_tag": lambda *tags: _release(cluster, tags),
                                               "materialize_with_tag": lambda *tags: cluster.asleep.difference_update(tags)},
        "tensorrt_llm._torch.pyexecutor": {},
        "tensorrt_llm._torch.pyexecutor.model_loader": {
            "ModelLoader": type("ModelLoader", (), {"begin_update_weights": 1} if api.guided_reload else {})},
        "tensorrt_llm.executor": {}, "tensorrt_llm.executor.worker": {"GenerationExecutorWorker": make_executor_worker(cluster)},
        "tensorrt_llm._utils": {"set_mpi_comm": lambda comm: None}, "ray": {"shutdown": lambda: cluster.calls.append("ray.shutdown")}}
    modules[api.tags_module]["ExecutorMemoryType"] = memory
    if api.sleep == "sleep_config":
        modules["tensorrt_llm.llmapi.llm_args"]["SleepConfig"] = keywords("SleepConfig", "restore_modes")
        modules["tensorrt_llm.sampling_params"]["LogprobMode"] = enum.Enum("LogprobMode", {"RAW": "raw"})
    drop = [*modules, "trtllm_rollout.driver.extension"]  # the extension is made from the fake's base class
    before = {name: sys.modules.pop(name, None) for name in drop}
    try:
        for name, content in modules.items():
            module = types.ModuleType(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
            module.__dict__.update(content)
            sys.modules[name] = module
        yield cluster
    finally:
        for name in drop:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if module is not None})
        for thread in threading.enumerate():
            assert thread.name != "tensorrt_llm", "an engine was not closed"


def _release(cluster: Cluster, tags: Sequence[str]) -> None:
    cluster.asleep.update(tags)
    if set(tags) & {"model", "model_weights"}:
        for parameter in cluster.shards()[0].parameters():
            parameter.fill_(float("nan"))
