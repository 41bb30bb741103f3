"""Matrix products of the decoder: rows that do not depend on each other, biases, FP8 block weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from parallel.bf16_cpu import lacks_bf16
from parallel.fp8_linear import rounded_rows, whole_blocks
from resharding.fp8 import SUFFIX, dequantise
from trtllm_rollout.embedded.native_fp8 import native_block_product

MIN_ROWS = 4
SHARED_FROM = 32768  # elements from which torch shares elementwise work among threads (at::internal::GRAIN_SIZE)
WIDENED_AT_ONCE = 1 << 20  # elements of a bf16 weight; 4 MiB in float32 are still in cache when they are multiplied


@dataclass(frozen=True)
class Linear:
    """A weight [out, in] (or of a rank's experts, [experts, out, in]), its block scales where it is FP8, and a bias [(experts,) out].

    `fp8_rows`: rows too are rounded to e4m3 first, with a scale for every 128 elements, where the device has no product that does so.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    fp8_rows: bool = False

    def of(self, expert: int) -> Linear:
        """The product of one of the experts."""
        return Linear(self.weight[expert], None if self.scale is None else self.scale[expert], None if self.bias is None else self.bias[expert],
                      self.fp8_rows)

    def in_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in `dtype`: itself, or its FP8 codes times their scales."""
        return self.weight.to(dtype) if self.scale is None else dequantise(self.weight, self.scale, dtype=dtype)


@dataclass(frozen=True)
class LayerTensors:
    """The tensors below one prefix, e.g. `model.layers.3.`, by the rest of their names."""

    weights: Mapping[str, torch.Tensor]
    prefix: str
    fp8_rows: bool = False

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[self.prefix + name]

    def get(self, name: str) -> torch.Tensor | None:
        return self.weights.get(self.prefix + name)

    def first(self, *names: str) -> str:
        """The first of `names` that is there: families call the same part by different words."""
        return next(name for name in names if name in self)

    def linear(self, name: str, separator: str = ".", bias: bool = True) -> Linear:
        """`<name>.weight` with its scales, and its bias where there is one and `bias` wants it."""
        weight = name + separator + "weight"
        return Linear(self[weight], self.get(weight + SUFFIX), self.get(name + separator + "bias") if bias else None, self.fp8_rows)


def padded(rows: int) -> int:
    """How many rows a product of few rows is padded to: where a thread's share would be less than 4 of them, CPU libraries take another
    kernel, whose rounding differs, and a request would come out differently alone than in a batch. MKL deals rows out in fours."""
    threads = torch.get_num_threads()
    if rows >= 4 * MIN_ROWS * threads:
        return rows
    return max(MIN_ROWS * threads, -(-rows // MIN_ROWS) * MIN_ROWS)


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """x [rows, in] -> [rows, out], rows padded (`padded`)."""
    rows, least = len(x), padded(len(x))
    if rows < least:
        return linear(F.pad(x, (0, 0, 0, least - rows)), layer)[:rows]
    if layer.scale is None:
        return _widened(x, layer) if _widens(x, layer.weight) else F.linear(x, layer.weight, layer.bias)
    product = native_block_product(x, layer.weight, layer.scale)
    if product is None:
        if layer.fp8_rows:
            x = rounded_rows(x, whole_blocks(x.shape[1]))
        return F.linear(x, layer.in_dtype(x.dtype), layer.bias)
    return product if layer.bias is None else product + layer.bias


@lru_cache(maxsize=None)
def _without_bf16() -> bool:
    return lacks_bf16()


def _widens(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 == weight.dtype and x.device.type == "cpu" and _without_bf16()


def _widened(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """The product of a bf16 weight on a CPU without bf16 instructions (see `parallel.bf16_cpu`): in float32, some rows of the weight at
    a time, so that their float32 copy never goes through memory."""
    outputs, inputs = layer.weight.shape
    wide = x.float()
    out = wide.new_empty(len(x), outputs)
    count = -(-outputs * inputs // WIDENED_AT_ONCE)
    for rows, part in zip(layer.weight.chunk(count), out.chunk(count, 1), strict=True):
        torch.mm(wide, rows.float().T, out=part)
    return (out if layer.bias is None else out.add_(layer.bias)).to(x.dtype)


def by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, in], weight [heads, in, out] -> [rows, heads, out], every head by its own matrix; rows padded as in `linear`."""
    rows, least = len(x), padded(len(x))
    if rows < least:
        return by_head(F.pad(x, (0, 0, 0, 0, 0, least - rows)), weight)[:rows]
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and _without_bf16():
        return torch.bmm(x.transpose(0, 1).float(), weight.float()).transpose(0, 1).to(x.dtype)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def silu(x: torch.Tensor) -> torch.Tensor:
    """silu of x [rows, columns], some columns of a wider tensor: the same bits for a row whatever the others are.

    torch computes the numbers that end a thread's share one by one, with another exp than the rest. So every share is made of whole rows
    here: as many rows for every thread, and what is left, or too little to share, in parts that one thread computes.
    """
    threads, columns = torch.get_num_threads(), x.shape[1]
    if x.device.type != "cpu" or threads == 1 or x.numel() < SHARED_FROM:
        return F.silu(x)
    even = len(x) - len(x) % threads
    even = even if even * columns >= threads * SHARED_FROM else 0
    out = x.new_empty(x.shape)
    parts = [(x[:even], out[:even])] if even else []
    alone = max(1, (SHARED_FROM - 1) // columns)
    for part, into in (*parts, *zip(x[even:].split(alone), out[even:].split(alone), strict=True)):
        torch.ops.aten.silu.out(part, out=into)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in fp32, cast back before the gain (transformers `LlamaRMSNorm`)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)

