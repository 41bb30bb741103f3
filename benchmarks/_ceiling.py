"""The physical limit that the benchmarks of computation are measured beside: the device's matrix products."""

from __future__ import annotations

import time

import torch

from parallel.model_config import ModelConfig
from resharding.layout import canonical_shapes

SIZE = 1024  # rows, columns and depth of the product that is timed
SECONDS = 1.0


def weights_per_token(model: ModelConfig) -> int:
    """Weights that every token is multiplied with: all matrices, the embedding only where it is the head too."""
    return sum(shape[0] * shape[1] for name, shape in canonical_shapes(model).items()
               if len(shape) == 2 and (model.tied or "embed_tokens" not in name))


def gemm_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations per second of one large matrix product (the fastest found in a second)."""
    a, b = (torch.randn(SIZE, SIZE, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < end:
        started = time.perf_counter()
        a @ b.t()  # as a linear layer does
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * SIZE ** 3 / best
