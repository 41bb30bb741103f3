"""What a user may choose of the TensorRT-LLM driver: the section `rollout.tensorrt_llm` of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from parallel.errors import UserError


def _option(help: str, default: Any, low: float | None = None, above: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "range": (low, above, high, None)})


@dataclass(frozen=True)
class DriverOptions:
    """How TensorRT-LLM is owned and fed. Raises UserError for values that contradict each other."""

    owner: Literal["ray", "inprocess"] = _option(
        "ray: the public AsyncLLM, whose workers are processes of their own on this replica's GPUs; inprocess: the PyTorch-backend executor "
        "inside each rank (internal names, ranks started by mpirun or srun)", "ray")
    weights: Literal["auto", "public", "rank_local"] = _option(
        "rank_local: each shard goes straight into the fused parameters; public: full tensors in buckets through TensorRT-LLM's own update; "
        "auto: rank_local where the model's parameters are known to match, else public", "auto")
    allow_version: str | None = _option(
        "a version of tensorrt_llm, other than the one the driver is written for, that is to be tried all the same; any: whatever is installed",
        None)
    sampler: Literal["auto", "TorchSampler", "TRTLLMSampler"] = _option(
        "auto: TorchSampler at rollout.temperature 1, else TRTLLMSampler, whose log-probs are those at the temperature", "auto")
    log_probs: Literal["reported", "logits"] = _option(
        "reported: what the sampler reports; logits: recomputed from the logits of every token (4 bytes x vocabulary each; TorchSampler only), "
        "right at any temperature", "reported")
    free_gpu_memory_fraction: float = _option("part of the GPU memory still free after start-up that the KV cache takes", 0.5, above=0, high=1)
    max_num_tokens: int = _option("most tokens in one iteration of the engine", 8192, low=1)
    bucket_mb: int = _option("full tensors that are on a GPU at once in a public update, in MB (one fused tensor at least)", 512, low=1)
    sleep: bool = _option("let the engine give its memory back between rollouts", True)
    start_timeout_s: float = _option("seconds to wait for the engine to start", 900.0, above=0)
    update_timeout_s: float = _option("seconds to wait for one step of a weights update, of sleep or of wake", 300.0, above=0)
    generate_timeout_s: float = _option("seconds to wait for the next sample", 1800.0, above=0)

    def __post_init__(self) -> None:
        for name in ("free_gpu_memory_fraction", "start_timeout_s", "update_timeout_s", "generate_timeout_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"rollout.tensorrt_llm.{name} is {getattr(self, name)}; it must be above 0")
        if self.owner == "inprocess" and self.weights == "public":
            raise UserError("rollout.tensorrt_llm.weights is public with owner inprocess: there the ranks hold the parameters themselves; "
                            "leave weights at auto, or set owner: ray")
        if self.log_probs == "logits" and self.sampler == "TRTLLMSampler":
            raise UserError("rollout.tensorrt_llm.log_probs is logits with sampler TRTLLMSampler, which scales the logits in place; "
                            "set sampler: TorchSampler, or log_probs: reported (right at any temperature with this sampler)")
