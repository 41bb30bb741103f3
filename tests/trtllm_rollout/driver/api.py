"""What the fake tensorrt_llm accepts: names and defaults of the calls that the driver makes, per version.

`WRITTEN` is a minimum by hand; `apis` adds the snapshot of the upstream interface where it is at hand, so that no test rests on it alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.conftest import SHARED

VERSIONS = ("1.2.1", "1.3.0rc10", "1.3.0rc15", "1.3.0rc21")
SNAPSHOT = SHARED / "notes/trtllm_api_snapshot.json"

_ARGUMENTS = """model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype pipeline_parallel_size
 moe_tensor_parallel_size moe_expert_parallel_size load_format kv_cache_config enable_chunked_prefill scheduler_config max_batch_size
 max_input_len max_seq_len max_num_tokens orchestrator_type backend cuda_graph_config moe_config sampler_type disable_overlap_scheduler
 stream_interval allreduce_strategy ray_worker_extension_cls ray_placement_config"""
_SAMPLING = """end_id pad_id max_tokens stop stop_token_ids include_stop_str_in_output n best_of top_k top_p min_p seed temperature min_tokens
 repetition_penalty presence_penalty logprobs prompt_logprobs return_generation_logits ignore_eos detokenize"""
_METHODS = {"generate_async": ["inputs", "sampling_params", "streaming"], "setup_async": [], "release": ["tags"], "resume": ["tags"],
            "update_weights": ["weights"], "collective_rpc": ["method", "args", "kwargs", "unique_reply_rank"], "shutdown": []}


@dataclass(frozen=True)
class Api:
    """Names that each call takes; whatever else is given is refused."""

    version: str
    arguments: frozenset[str]
    sampling: frozenset[str]
    methods: dict[str, tuple[str, ...]]
    sleep: str
    tags: dict[str, str]
    tags_module: str
    pause: bool
    guided_reload: bool


def api(version: str, source: str = "written") -> Api:
    number = VERSIONS.index(version)
    if source == "snapshot":
        classes: dict[str, Any] = json.loads(SNAPSHOT.read_text())["classes"]
        arguments = set(classes["tensorrt_llm.LLM"]["init_args"])
        sampling = set(classes["tensorrt_llm.SamplingParams"]["fields"])
        methods = {**classes["tensorrt_llm.LLM"]["methods"], **classes["tensorrt_llm.AsyncLLM"]["methods"]}
        calls = {name: list(method["params"]) for name, method in methods.items()}
    else:
        arguments, sampling, calls = set(_ARGUMENTS.split()) | {"enable_sleep"}, set(_SAMPLING.split()), dict(_METHODS)
    tags = {"SAMPLER": "sampler", "KV_CACHE": "kv_cache", "MODEL_ENGINE_MAIN": "model"}
    if number >= 1:
        arguments = arguments - {"enable_sleep"} | {"sleep_config"}
        sampling |= {"logprobs_mode"}
        tags["MODEL_WEIGHTS_MAIN"] = "model_weights"
        calls["collective_rpc"] = [*calls["collective_rpc"], "target_ranks"]
    if number >= 2:
        calls |= {"pause_generation": [], "resume_generation": []}
    if number >= 3:
        sampling |= {"logprobs_simple_format"}
    return Api(version, frozenset(arguments), frozenset(sampling), {name: tuple(p) for name, p in calls.items()},
               "sleep_config" if number >= 1 else "enable_sleep", tags,
               "tensorrt_llm.llmapi.llm_args" if number >= 1 else "tensorrt_llm._torch.virtual_memory", number >= 2, number >= 3)


def apis() -> list[Api]:
    return [api(version, source) for source in ("written", *(["snapshot"] if SNAPSHOT.is_file() else [])) for version in VERSIONS]
