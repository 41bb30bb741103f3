"""What an engine's sleep gives back to the device, and how long it takes from there to the next token."""

from __future__ import annotations

import gc
import os
import time

import torch

from benchmarks._rollout_work import Work, run_engine
from parallel.model_config import ModelConfig
from resharding.layout import canonical_blocks
from resharding.sync import WeightSync
from trtllm_rollout.embedded.engine import EmbeddedEngine


def resident(device: torch.device) -> int:
    """Bytes of this process in memory, or in use on the GPU, as the system counts them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sleep_figures(engine: EmbeddedEngine, model: ModelConfig, work: Work, before: int, device: torch.device) -> dict[str, float]:
    """`before`: what was resident without the engine. The sync comes from a copy of the weights in the same process, checksums included."""
    held = resident(device) - before
    copy = {name: tensor.clone() for name, tensor in engine.weights().items()}
    beside = sum(t.nbytes for t in copy.values())
    engine.sleep(["kv_cache", "weights"])
    left = resident(device) - before - beside
    sync = WeightSync(engine.layouts, engine.layouts, canonical_blocks(model))
    started = time.perf_counter()
    engine.wake(["weights"])
    awake = time.perf_counter()
    seconds = sync.run(copy, engine, 1).seconds
    engine.wake(["kv_cache"])
    one = Work(work.prompts[:1], 1, (1,))
    begun = time.perf_counter()
    run_engine(engine, one, fresh=False)
    ended = time.perf_counter()
    return {"engine_bytes": float(held), "sleep_gives_back": 1 - max(0, left) / held, "wake_seconds": awake - started, "sync_seconds": seconds,
            "first_token_seconds": ended - begun, "wake_sync_first_token_seconds": ended - started}
