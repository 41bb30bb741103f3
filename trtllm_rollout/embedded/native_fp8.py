"""FP8 block weights multiplied as they are, on devices that can: `torch._scaled_mm` with a scale for every 128 x 128 of the weight.

The rows are quantised on the way, with a scale for every 128 elements of a row, as DeepSeek-V3 and TensorRT-LLM do (arXiv:2412.19437, 3.3.2);
the product is that of rounded rows, so it is not the one of the dequantised weight. Nothing here has run on a GPU yet: before a
device is used, a small product on it is compared with the dequantised one, and where that fails weights are dequantised.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from resharding.fp8 import BLOCK, E4M3, dequantise, quantise, scale_of

logger = logging.getLogger(__name__)
TOLERANCE = 0.05  # of the largest value: rounding rows to 3 bits of mantissa makes about 0.02


def native_block_product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """x [rows, in] times codes [out, in] with scales [out / 128, in / 128] -> [rows, out]; None where it must be dequantised."""
    whole = codes.shape[0] % BLOCK[0] == 0 and codes.shape[1] % BLOCK[1] == 0
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or not whole or not multiplies_blocks(x.device):
        return None
    return _product(x, codes, scale)


@lru_cache(maxsize=None)
def multiplies_blocks(device: torch.device) -> bool:
    """Whether to use a device's product. Hopper with CUDA 12.9 or later is known to have it; the CPU has none."""
    return device.type == "cuda" and gives_block_products(device)


def gives_block_products(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` takes block scales there and gives what it should."""
    try:
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(16, 256, generator=generator, device=device, dtype=torch.bfloat16)
        codes, scale = quantise(torch.randn(256, 256, generator=generator, device=device, dtype=torch.bfloat16))
        expected = x.float() @ dequantise(codes, scale, dtype=torch.float32).T
        error = float((_product(x, codes, scale).float() - expected).abs().max() / expected.abs().max())
    except (RuntimeError, ValueError, TypeError, AttributeError) as problem:
        logger.info("FP8 weights are dequantised for every product on %s: torch._scaled_mm says %s", device, problem)
        return False
    if not error < TOLERANCE:
        logger.warning("FP8 weights are dequantised for every product on %s: torch._scaled_mm is off by %.3f of the largest value", device, error)
        return False
    return True


def _product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, scales = quantised_rows(x)
    # scales of rows column-major, scales of the transposed weight by their own transposition: what torch asks of 1 x 128 by 128 x 128
    return torch._scaled_mm(rows, codes.T, scale_a=scales.T.contiguous().T, scale_b=scale.T, out_dtype=x.dtype)


def quantised_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, in] and scales [rows, in / 128] of x, one scale for every 128 elements of a row."""
    grouped = x.float().unflatten(1, (-1, BLOCK[1]))
    scales = scale_of(grouped.abs().amax(-1))
    return (grouped / scales[..., None]).flatten(1).to(E4M3), scales
