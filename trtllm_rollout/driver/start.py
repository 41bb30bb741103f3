"""From a configuration to a running TensorRT-LLM engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from trtllm_rollout.driver.agreed import Ranks
from trtllm_rollout.driver.engine import TensorRTEngine
from trtllm_rollout.driver.inprocess_owner import InProcessOwner
from trtllm_rollout.driver.options import DriverOptions
from trtllm_rollout.driver.owner import Setup
from trtllm_rollout.driver.ray_owner import RayOwner
from trtllm_rollout.driver.sampling import Dialect, choose_sampler
from trtllm_rollout.driver.seam import build

OWNERS = {"ray": RayOwner, "inprocess": InProcessOwner}


def check_engine(model: ModelConfig, options: DriverOptions, tp: int, device: torch.device | None = None,
                 per_host: int | None = None) -> build.Features:
    """What is installed, where this configuration can run on it. Raises UserError with what to do; nothing is started."""
    features = build.load(options.allow_version)
    if device is not None and device.type != "cuda":
        raise UserError("rollout.engine is tensorrt_llm, which runs on CUDA devices, but this run is on the CPU; set run.device: cuda, "
                        "or rollout.engine: embedded")
    if options.owner == "ray" and per_host is not None and tp > per_host:
        raise UserError(f"rollout.tp is {tp} with {per_host} ranks on this host: one engine of owner ray stays within a host; lower rollout.tp")
    if model.hf.get("quantization_config"):
        raise UserError("rollout.engine is tensorrt_llm with a quantised model, whose scales this driver does not send; "
                        "use the unquantised weights")
    return features


def make_engine(model: ModelConfig, dtype: torch.dtype, ranks: tuple[int, ...], index: int, replica: int, group: dist.ProcessGroup | None,
                device: torch.device, options: DriverOptions, max_batch_size: int, temperature: float = 1.0, moe_ep: int = 1,
                max_seq_len: int | None = None) -> TensorRTEngine:
    """Collective over the replica's `ranks` (of the world, this one being `index`); `group` carries host objects among them (gloo).

    `temperature` is the run's (the sampler is chosen by it). Raises UserError, EngineTimeout or EngineRefuses on all ranks.
    """
    features = build.load(options.allow_version)
    limit = max_seq_len or model.max_position_embeddings
    sampler = choose_sampler(options.sampler, temperature, options.log_probs == "logits")
    together = Ranks(ranks, index, group)
    setup = Setup(features, options, model, dtype, device, together, moe_ep, replica, max_batch_size, limit, sampler)
    owner = OWNERS[options.owner](setup)
    return TensorRTEngine(model, owner, together, Dialect(features, sampler, options.log_probs == "logits"), limit)  # type: ignore[arg-type]
