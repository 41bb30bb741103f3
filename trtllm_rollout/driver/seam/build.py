"""Which tensorrt_llm is installed, and what it can do: detected, never assumed from the version."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any

from parallel.errors import UserError

TARGET = "1.3.0rc15"  # what verl 0.9.1 runs (its docker/Dockerfile.stable.trtllm)
EMBEDDED = "or set rollout.engine: embedded, which needs no TensorRT-LLM"
INSTALL = f"install tensorrt_llm {TARGET} (NVIDIA's container tensorrt-llm/release:{TARGET}, or the wheel tensorrt-llm=={TARGET}), {EMBEDDED}"


@dataclass(frozen=True)
class Features:
    """What the installed build offers.

    `sleep`: the constructor's keyword, or None. `tags`: the memory tags it knows. `pause`: generation can be paused and resumed.
    `sampling`: fields of its SamplingParams. `log_prob_modes`: values of `logprobs_mode`, () where it has none. `arguments`: keywords
    of the engine's constructor, empty where they cannot be listed. `guided_reload`: the loader has begin/finalize_update_weights.
    """

    version: str
    sleep: str | None
    tags: frozenset[str]
    pause: bool
    sampling: frozenset[str]
    log_prob_modes: tuple[str, ...]
    arguments: frozenset[str]
    guided_reload: bool

    def memory_tags(self, tag: str) -> tuple[str, ...]:
        """The build's tags of our "weights" or "kv_cache". Raises UserError where it has none."""
        wanted = {"kv_cache": ("kv_cache",), "weights": ("model_weights", "model")}[tag]  # model: up to 1.3.0rc9
        found = next(((name,) for name in wanted if name in self.tags), None)
        if found is None:
            raise UserError(f"tensorrt_llm {self.version} has no memory tag for {tag} ({' or '.join(wanted)} was looked for among "
                            f"{', '.join(sorted(self.tags)) or 'none'}); set rollout.tensorrt_llm.sleep: false")
        return found


def installed_version() -> str | None:
    """The version of tensorrt_llm that would be imported, or None."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return None
    return str(importlib.import_module("tensorrt_llm").__version__)


def load(allow_version: str | None = None) -> Features:
    """Import tensorrt_llm and see what it can do.

    Raises UserError, with what to install, where it is missing, does not import, is another version than the driver is written for
    (and not `allow_version`), or cannot be updated in place.
    """
    try:
        version = installed_version()
    except Exception as error:  # a wheel that does not fit torch or the driver fails with whatever its extension raises
        raise UserError(f"tensorrt_llm is installed but does not import: {type(error).__name__}: {error}; {INSTALL}") from error
    if version is None:
        raise UserError(f"rollout.engine is tensorrt_llm, but the package tensorrt_llm is not installed; {INSTALL}")
    if version != TARGET and allow_version not in (version, "any"):
        raise UserError(f"tensorrt_llm {version} is installed, but this driver is written for {TARGET}; {INSTALL}, or try this one with "
                        f"rollout.tensorrt_llm.allow_version: {version} (after benchmarks/trtllm_smoke.py has passed on it)")
    return detect(version)


def detect(version: str) -> Features:
    """What the installed build offers. Raises UserError where it has no AsyncLLM."""
    llm = find("AsyncLLM", "tensorrt_llm.llmapi", "tensorrt_llm", "tensorrt_llm._torch.async_llm")
    sampling = find("SamplingParams", "tensorrt_llm.llmapi", "tensorrt_llm", "tensorrt_llm.sampling_params")
    if llm is None or sampling is None:
        raise UserError(f"tensorrt_llm {version} has no {'AsyncLLM' if llm is None else 'SamplingParams'}: weights cannot be updated in "
                        f"place with it; {INSTALL}")
    arguments = getattr(find("TorchLlmArgs", "tensorrt_llm.llmapi", "tensorrt_llm.llmapi.llm_args"), "model_fields", {})
    sleep = "sleep_config" if sleep_config() is not None else "enable_sleep" if "enable_sleep" in arguments else None
    modes = find("LogprobMode", "tensorrt_llm.sampling_params", "tensorrt_llm.llmapi")
    loader = find("ModelLoader", "tensorrt_llm._torch.pyexecutor.model_loader")
    fields = ({f.name for f in dataclasses.fields(sampling)} if dataclasses.is_dataclass(sampling)
              else set(inspect.signature(sampling).parameters))
    memory = memory_types()
    return Features(version, sleep, frozenset(str(m.value) for m in memory) if memory is not None else frozenset(),
                    hasattr(llm, "pause_generation"), frozenset(fields),
                    tuple(str(m.value) for m in modes) if modes is not None and "logprobs_mode" in fields else (),
                    frozenset(arguments), hasattr(loader, "begin_update_weights"))


def find(name: str, *modules: str) -> Any:
    """The first of the modules' attributes of that name, or None: upstream moves them between versions."""
    for module in modules:
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    return None


def memory_types() -> Any:
    """The enum of memory tags; it moved from virtual_memory to llm_args in 1.3.0rc10."""
    return find("ExecutorMemoryType", "tensorrt_llm.llmapi.llm_args", "tensorrt_llm._torch.virtual_memory")


def sleep_config() -> Any:
    """The class SleepConfig, which replaced `enable_sleep` in 1.3.0rc10, or None."""
    return find("SleepConfig", "tensorrt_llm.llmapi.llm_args", "tensorrt_llm.llmapi")


def sleep_arguments(features: Features) -> dict[str, Any]:
    """Constructor keywords that let an engine give its memory back. What is asleep is not kept: weights are sent anew after waking.

    Raises UserError where the build cannot sleep.
    """
    if features.sleep is None:
        raise UserError(f"tensorrt_llm {features.version} cannot give its memory back; set rollout.tensorrt_llm.sleep: false")
    if features.sleep == "enable_sleep":
        return {"enable_sleep": True}  # keeps the weights in host memory while asleep
    lost = {*features.memory_tags("weights"), *features.memory_tags("kv_cache")}
    return {"sleep_config": sleep_config()(restore_modes={m: "NONE" for m in memory_types() if m.value in lost})}


def make_sampling_params(features: Features, values: dict[str, Any]) -> Any:
    """The build's SamplingParams. Raises UserError that names a field it does not have."""
    if unknown := sorted(values.keys() - features.sampling):
        raise UserError(f"tensorrt_llm {features.version}: SamplingParams has no {', '.join(unknown)}; {INSTALL}")
    return find("SamplingParams", "tensorrt_llm.llmapi", "tensorrt_llm", "tensorrt_llm.sampling_params")(**values)


def engine_arguments(features: Features, directory: str, values: dict[str, Any]) -> dict[str, Any]:
    """Keywords of an engine of random weights for the model in `directory` (config.json alone), to be filled by the first update.

    `values`: tensor_parallel_size, moe_expert_parallel_size, dtype, max_batch_size, max_seq_len, max_num_tokens, sampler_type,
    free_gpu_memory_fraction, sleep, moe (whether the model has experts). Raises UserError for keywords that the build does not have.
    """
    values = dict(values)
    moe_ep, fraction = values.pop("moe_expert_parallel_size"), values.pop("free_gpu_memory_fraction")
    sleep, moe = values.pop("sleep"), values.pop("moe")
    cache = find("KvCacheConfig", "tensorrt_llm.llmapi")(enable_block_reuse=True, free_gpu_memory_fraction=fraction)
    scheduler = find("SchedulerConfig", "tensorrt_llm.llmapi")
    policy = find("CapacitySchedulerPolicy", "tensorrt_llm.llmapi")
    graphs = find("CudaGraphConfig", "tensorrt_llm.llmapi")(enable_padding=True, max_batch_size=values["max_batch_size"])
    out = {"model": directory, "skip_tokenizer_init": True, "backend": "pytorch", "load_format": "dummy", "kv_cache_config": cache,
           "scheduler_config": scheduler(capacity_scheduler_policy=policy.MAX_UTILIZATION if policy is not None else "MAX_UTILIZATION"),
           "cuda_graph_config": graphs, "max_input_len": values["max_seq_len"], "enable_chunked_prefill": True, **values}
    if moe:
        # other backends reorder the experts' weights after loading
        out["moe_config"] = find("MoeConfig", "tensorrt_llm.llmapi")(backend="CUTLASS")
        out.update(moe_expert_parallel_size=moe_ep, moe_tensor_parallel_size=values["tensor_parallel_size"] // moe_ep)
    if sleep:
        out.update(sleep_arguments(features))
    if features.arguments and (unknown := sorted(out.keys() - features.arguments)):
        raise UserError(f"tensorrt_llm {features.version}: its engine has no argument {', '.join(unknown)}; {INSTALL}")
    return out
