"""FP8 training where Transformer Engine is not: products of rounded operands, in the numbers of block-scaled FP8 (`actor.fp8: blockwise`).

Every linear layer of the decoder (attention, MLPs, experts, latent projections) computes, with q() for "to e4m3 and back":

    output         = q(input) @ q(weight).T               input: a scale for every 128 features of a token; weight: for every 128 x 128
    input gradient = q(output gradient) @ q(weight)        output gradient: as the input
    weight gradient = q(output gradient).T @ q(input)      of the unrounded weight: the rounding itself is passed straight through

scale = (largest magnitude in the block) / 448, which is DeepSeek-V3's (arXiv 2412.19437, 3.3) and that of the sync's FP8 weights
(`resharding.fp8`). Products and sums are those of the model's dtype; optimizer and main gradients are not touched. Embeddings, head,
router, norms and biases stay as they are. Unlike Transformer Engine: both operands of the weight gradient keep the blocks along
features (TE rounds them anew along tokens), scales are not powers of 2, and blocks are those of the canonical tensors (q, k and v,
gate and up apart), not of the fused ones.

Blocks are those of the whole tensor under every tensor-parallel size: where a block lies on several ranks its largest magnitude is
exchanged (an all-reduce of the block maxima), so that no result depends on the layout. It costs no accuracy, and time: on a CPU it is
for tests and for finding out what FP8 does to a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.model_config import ModelConfig

BLOCK = 128
E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0


@dataclass(frozen=True)
class Blocks:
    """Which block of the canonical tensors each element along one dimension of a shard is in.

    `index` [elements] counts through the blocks of all canonical tensors that a fused one holds; there are `count`. `group`: the ranks
    that hold parts of the same block, None where every block lies on one rank.
    """

    index: Tensor
    count: int
    group: Any = None

    def to(self, device: torch.device) -> Blocks:
        return self if self.index.device == device else Blocks(self.index.to(device), self.count, self.group)


@lru_cache(maxsize=256)
def whole_blocks(size: int) -> Blocks:
    """Of a dimension that is not cut."""
    return Blocks(torch.arange(size) // BLOCK, math.ceil(size / BLOCK))


def cut_blocks(index: Tensor, rank: int, group: Any) -> Blocks:
    """Of this rank's share of a dimension. `index` [ranks, elements] are the blocks on every rank."""
    on_ranks = [set(row.tolist()) for row in index]
    split = sum(map(len, on_ranks)) > len(set().union(*on_ranks))
    return Blocks(index[rank], int(index.max()) + 1, group if split else None)


def _fused(model: ModelConfig, name: str, size: int, ranks: int) -> Tensor:
    """Blocks [ranks, rows] of the canonical tensors that a column-parallel weight of `size` rows holds, as Megatron fuses and cuts it."""
    def numbered(*sizes: int) -> list[Tensor]:
        starts = [sum(math.ceil(s / BLOCK) for s in sizes[:i]) for i in range(len(sizes))]
        return [start + torch.arange(s) // BLOCK for start, s in zip(starts, sizes, strict=True)]

    if name.endswith("linear_qkv"):  # by query group: its query heads, its key head, its value head
        q, k, v = (x.view(model.num_kv_heads, -1) for x in numbered(model.q_size, model.kv_size, model.kv_size))
        return torch.cat([q, k, v], 1).view(ranks, -1)
    if name.endswith("linear_fc1"):  # every rank's gate rows above its up rows
        gate, up = (x.view(ranks, -1) for x in numbered(size // 2, size // 2))
        return torch.cat([gate, up], 1)
    return numbered(size)[0].view(ranks, -1)


def block_amax(values: Tensor, blocks: Blocks) -> Tensor:
    """Largest magnitudes [rows, blocks] in fp32 of values [rows, elements], on this rank."""
    out = torch.zeros(values.shape[0], blocks.count, dtype=torch.float32, device=values.device)
    return out.index_reduce_(1, blocks.index, values.detach().abs().float(), "amax")


def _scale(amax: Tensor, *groups: Any) -> Tensor:
    """Factors of blocks by their largest magnitudes, of all ranks of `groups` (None: this one's)."""
    for group in groups:
        if group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    scale = amax / E4M3_MAX
    return torch.where(scale < torch.finfo(torch.float32).smallest_normal, torch.ones_like(scale), scale)


def _round(values: Tensor, scale: Tensor) -> Tensor:
    """Values to e4m3 and back; `scale` is each value's."""
    codes = (values.detach().float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.float().mul_(scale).to(values.dtype)


def rounded_rows(values: Tensor, blocks: Blocks) -> Tensor:
    """[..., features] rounded with a scale for every block of a row's features."""
    rows = values.reshape(-1, values.shape[-1])
    scale = _scale(block_amax(rows, blocks), blocks.group)
    return _round(rows, scale[:, blocks.index]).view(values.shape)


def rounded_weight(weight: Tensor, rows: Blocks, columns: Blocks) -> Tensor:
    """A weight [rows, columns] rounded with a scale for every block of rows and columns."""
    amax = torch.zeros(rows.count, columns.count, dtype=torch.float32, device=weight.device)
    amax.index_reduce_(0, rows.index, block_amax(weight, columns), "amax")
    scale = _scale(amax, rows.group, columns.group)
    return _round(weight, scale[rows.index][:, columns.index])


class _Rounded(torch.autograd.Function):
    """Rounded forward, straight through backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, round_: Any) -> Tensor:
        return round_(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _RoundedGradient(torch.autograd.Function):
    """Straight through forward, rounded backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, round_: Any) -> Tensor:
        ctx.round = round_
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.round(grad), None


def _forward(product: Any, rows: Blocks, columns: Blocks, input: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
    """A linear layer's `_forward_impl` (`product`) on rounded operands. A bias is added after it, so that its gradient is not rounded."""
    rows, columns = rows.to(weight.device), columns.to(weight.device)
    x = _Rounded.apply(input, partial(rounded_rows, blocks=columns))
    w = _Rounded.apply(weight, partial(rounded_weight, rows=rows, columns=columns))
    out = _RoundedGradient.apply(product(input=x, weight=w, bias=None, **named), partial(rounded_rows, blocks=rows))
    return out if bias is None else out + bias


def _linears(module: Any) -> Iterator[tuple[str, Any]]:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for name, part in module.decoder.layers.named_modules():
        if isinstance(part, (ColumnParallelLinear, RowParallelLinear)):
            yield name, part


def round_linears(module: Any, model: ModelConfig) -> int:
    """Let the decoder's linear layers of a GPTModel (local spec) compute with rounded operands; returns how many.

    Only these instances change: each gets a `_forward_impl` of its own, the call that Megatron's ColumnParallelLinear and
    RowParallelLinear make for the product between their collectives.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear

    count = 0
    for name, linear in _linears(module):
        ranks, rank, group = linear.tp_group.size(), linear.tp_group.rank(), linear.tp_group
        if isinstance(linear, ColumnParallelLinear):
            rows, columns = cut_blocks(_fused(model, name, linear.output_size, ranks), rank, group), whole_blocks(linear.input_size)
        else:
            rows, columns = whole_blocks(linear.output_size), cut_blocks((torch.arange(linear.input_size) // BLOCK).view(ranks, -1), rank, group)
        linear._forward_impl = partial(_forward, linear._forward_impl, rows, columns)
        count += 1
    return count
