"""What is done to an engine inside a worker process: the order is that of upstream's `llmapi/rlhf_utils.py`.

`engine` is a PyExecutor. Its names are internal: `docs/tensorrt-llm.md` says where each was read.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trtllm_rollout.driver.seam.build import find


def extension_base() -> type:
    """Upstream's own mixin, which has the public `update_weights`."""
    found = find("WorkerExtension", "tensorrt_llm.llmapi.rlhf_utils")
    assert isinstance(found, type), "tensorrt_llm.llmapi.rlhf_utils has no WorkerExtension"
    return found


def device_uuid(device_id: int) -> str:
    return str(find("get_device_uuid", "tensorrt_llm._torch.utils")(device_id))


@contextmanager
def quiet(engine: Any) -> Iterator[None]:
    """The engine's loop stands still inside; it enters once all requests have ended. Every rank of the engine calls it."""
    with engine.control_action():
        yield


def model_of(engine: Any) -> torch.nn.Module:
    model = engine.model_engine.model
    assert isinstance(model, torch.nn.Module)
    return model


def tp_rank(engine: Any) -> int:
    return int(engine.dist.mapping.tp_rank)


def allows_partial(engine: Any) -> bool:
    """Whether the model's loader takes some of the tensors at a time (DeepSeek-V3's does not)."""
    return "allow_partial_loading" in inspect.signature(engine.model_engine.model.load_weights).parameters


def reload(engine: Any, weights: Mapping[str, torch.Tensor], partial: bool) -> None:
    """HF tensors into the model, through its own loader."""
    engine.model_engine.model_loader.reload(model_of(engine), dict(weights), allow_partial_loading=partial)


def before_reload(engine: Any) -> None:
    for module in _modules(engine, "pre_reload_weights"):
        module.pre_reload_weights()


def after_load(engine: Any) -> None:
    """What follows new weights: derived tensors, the expert load balancer, the prefix cache, memory of others that is still mapped."""
    for module in _modules(engine, None):
        for hook in ("process_weights_after_loading", "post_load_weights"):
            if hasattr(module, hook):
                getattr(module, hook)()
    balancer = getattr(engine.model_engine, "moe_load_balancer", None)
    if balancer is not None and hasattr(balancer, "finalize_model"):
        balancer.register_weight_slots_after_to_cuda()
        balancer.finalize_model()
    forget_prefixes(engine)
    collect()


def forget_prefixes(engine: Any) -> None:
    engine.reset_prefix_cache()


def collect() -> None:
    """Unmap what other processes shared, and give freed memory back."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def release(tags: Sequence[str]) -> None:
    """Unmap the memory of this process that carries the tags (the engine must be quiet)."""
    collect()
    find("release_with_tag", "tensorrt_llm._torch.virtual_memory")(*tags)
    collect()


def materialize(tags: Sequence[str]) -> None:
    find("materialize_with_tag", "tensorrt_llm._torch.virtual_memory")(*tags)
    collect()


def _modules(engine: Any, hook: str | None) -> Iterator[Any]:
    return (m for m in model_of(engine).modules() if (hook is None or hasattr(m, hook)) and not getattr(m, "_weights_removed", False))
