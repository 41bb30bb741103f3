"""The physical limit that the benchmarks of computation are measured beside: the device's matrix products."""

from __future__ import annotations

import re
import time

import torch

from parallel.model_config import ModelConfig
from resharding.layout import canonical_shapes

SIZE = 1024  # rows, columns and depth of the product that is timed; on a GPU 8 times as many
SECONDS = 1.0
_EXPERT = re.compile(r"\.experts\.\d+\.|\.experts\.(gate_up|down)_proj")


def weights_per_token(model: ModelConfig, batch: int = 1, head: bool = True) -> int:
    """Weights that every token is multiplied with: all matrices, the embedding only where it is the head too (left out without `head`),
    and of the experts those that are chosen. With `batch`: weights that a step of so many tokens reads, if each chooses other experts."""
    share = min(1.0, batch * model.moe.top_k / model.moe.num_experts) if model.moe is not None else 1.0
    total = 0.0
    for name, shape in canonical_shapes(model).items():
        if len(shape) < 2 or "embed_tokens" in name and not (model.tied and head) or "lm_head" in name and not head:
            continue
        total += torch.Size(shape).numel() * (share if _EXPERT.search(name) else 1.0)
    return round(total)


def gemm_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations per second of one large matrix product (the fastest found in a second)."""
    size = SIZE * 8 if device.type == "cuda" else SIZE
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < end:
        started = time.perf_counter()
        a @ b.t()  # as a linear layer does
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size ** 3 / best
