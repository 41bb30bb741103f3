"""Decoding beside the device's memory bandwidth, and prefill beside its matrix products.

Decoding a step reads every weight once and the keys and values of all samples; computing a prompt is products. Both are measured from
outside, as differences of whole runs, so Python, launches and sampling are in them.
"""

from __future__ import annotations

import itertools
import time

import torch

from benchmarks._ceiling import gemm_flops, weights_per_token
from benchmarks._rollout_work import Work, random_prompts, run_engine
from parallel.model_config import ModelConfig
from trtllm_rollout.embedded.engine import EmbeddedEngine

COPIED = 1 << 30  # bytes on a GPU; a quarter of it elsewhere


def limits(engine: EmbeddedEngine, model: ModelConfig, dtype: torch.dtype, device: torch.device, batch: int, tokens: int, prompt: int,
           repeat: int) -> dict[str, float]:
    """Figures of decoding `tokens` tokens of `batch` samples of different prompts, and of prefill of as many prompts of `prompt` tokens."""
    seeds = itertools.count()

    def seconds(count: int) -> float:
        """Of the fastest run; every run has prompts of its own, so none is in a cache."""
        works = [Work(random_prompts(batch, prompt, model.vocab_size, next(seeds)), 1, (count,) * batch) for _ in range(repeat)]
        return min(run_engine(engine, work, fresh=False).seconds for work in works)

    seconds(2)
    prefill, whole = seconds(1), seconds(tokens)
    step = (whole - prefill) / (tokens - 1)
    bandwidth, rate = bytes_per_second(device), gemm_flops(dtype, device)
    read = weights_per_token(model, batch) * dtype.itemsize + batch * (prompt + tokens / 2) * kv_bytes(model, dtype)
    return {"decode_tokens_per_s": batch / step, "decode_step_seconds": step, "bandwidth_gb_per_s": bandwidth / 1e9,
            "decode_of_bandwidth": read / bandwidth / step, "prefill_tokens_per_s": batch * prompt / prefill,
            "prefill_of_gemm": 2 * batch * (prompt * weights_per_token(model, head=False) + head_weights(model)) / rate / prefill}


def head_weights(model: ModelConfig) -> int:
    """Of the last product, which only the last token of a prompt needs."""
    return model.vocab_size * model.hidden_size


def kv_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Of keys and values of one token in all layers."""
    one = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim if model.mla is not None else 2 * model.num_kv_heads * model.head_dim
    return model.num_layers * one * dtype.itemsize


def bytes_per_second(device: torch.device) -> float:
    """What the fastest of some copies reads and writes together."""
    size = COPIED if device.type == "cuda" else COPIED // 4
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
