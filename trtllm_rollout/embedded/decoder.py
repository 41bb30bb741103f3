"""The one decoder of all families, over a tensor-parallel group: an attention block and a feed-forward part a layer, chosen by the model.

Its parameters *are* the `trtllm` layout's tensors: fused qkv and gate_up rows of this rank, stacked experts, vocabulary rows ceil(V / tp).
Rounding follows transformers' modelling (norms, rotary tables and routers in fp32, the rest in the weights' type).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel.model_config import ModelConfig
from trtllm_rollout.embedded.attention_blocks import GroupedQuery, Latent, attention_block
from trtllm_rollout.embedded.experts import Experts, Note, SwiGLU, feed_forward
from trtllm_rollout.embedded.linear import MIN_ROWS, LayerTensors, Linear, linear, rms_norm
from trtllm_rollout.embedded.rotary import rotary_tables

__all__ = ["MIN_ROWS", "Attention", "Decoder", "TensorParallel"]

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer on this rank."""

    input_norm: torch.Tensor
    attention: GroupedQuery | Latent
    post_norm: torch.Tensor
    mlp: SwiGLU | Experts


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in the engine's group; `group` None is a single rank. `moe_ep`: ranks over which whole experts are dealt."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    moe_ep: int = 1

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


class Decoder:
    """Forward pass over packed rows. Holds references to the engine's weights, so an update needs no reload."""

    def __init__(self, model: ModelConfig, weights: dict[str, torch.Tensor], parallel: TensorParallel, max_tokens: int,
                 fp8_rows: bool = False) -> None:
        """`weights`: this rank's tensors of the `trtllm` layout, FP8 ones with their scales. Positions are below `max_tokens`. `fp8_rows`: see `Linear`."""
        self._model, self._parallel = model, parallel
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = Linear(self._embedding if model.tied else weights["lm_head.weight"])
        self._norm = weights["model.norm.weight"]
        self._layers = [_layer(model, weights, i, parallel, fp8_rows) for i in range(model.num_layers)]
        self.heads = tuple(layer.attention.heads for layer in self._layers)
        self._cos, self._sin = rotary_tables(model, max_tokens, self._embedding.dtype, self._embedding.device)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention, note: Note | None = None) -> torch.Tensor:
        """Final hidden states [rows, hidden] of token `ids` [rows] at `positions` [rows]; `attention` owns the cache; `note`: see `Experts`."""
        reduce, eps = self._parallel.reduce, self._model.rms_norm_eps
        x = self._embed(ids)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for index, layer in enumerate(self._layers):
            x += reduce(layer.attention(rms_norm(x, layer.input_norm, eps), cos, sin, partial(attention, index)))
            x += reduce(layer.mlp(rms_norm(x, layer.post_norm, eps), note))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits [rows, vocab_size] on the group's leader, None elsewhere. Padding rows of the vocabulary are cut off."""
        local = linear(rms_norm(hidden, self._norm, self._model.rms_norm_eps), self._head)
        if self._parallel.size == 1:
            return local[:, :self._model.vocab_size]
        parts = [torch.empty_like(local) for _ in range(self._parallel.size)] if self._parallel.rank == 0 else None
        dist.gather(local.contiguous(), parts, group=self._parallel.group, group_dst=0)
        return torch.cat(parts, dim=-1)[:, :self._model.vocab_size] if parts else None

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Vocabulary-parallel lookup: ids of other ranks contribute zeros to the sum."""
        if self._parallel.size == 1:
            return F.embedding(ids, self._embedding)
        rows = self._embedding.shape[0]
        local = ids - self._parallel.rank * rows
        mine = (local >= 0) & (local < rows)
        x = F.embedding(torch.where(mine, local, 0), self._embedding)
        return self._parallel.reduce(torch.where(mine[:, None], x, 0.0))


def _layer(model: ModelConfig, weights: dict[str, torch.Tensor], index: int, parallel: TensorParallel, fp8_rows: bool) -> Layer:
    layer = LayerTensors(weights, f"model.layers.{index}.", fp8_rows)
    return Layer(layer["input_layernorm.weight"], attention_block(model, layer, index, parallel.size, parallel.rank),
                 layer["post_attention_layernorm.weight"], feed_forward(model, layer, index, parallel.rank, parallel.moe_ep))
