"""The one decoder of all families: RMSNorm, rotary positions, grouped-query attention, SwiGLU, over a tensor-parallel group.

Its parameters *are* the `trtllm` layout's tensors: fused qkv and gate_up rows of this rank, vocabulary rows ceil(V / tp).
Rounding follows transformers' modelling of Llama and Qwen2 (norms and rotary tables in fp32, the rest in the weights' type).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel.errors import UserError
from parallel.model_config import ModelConfig, RopeScaling, Yarn

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MIN_ROWS = 4


@dataclass(frozen=True)
class Layer:
    """The tensors of one layer on this rank; `qkv_bias` and the norms of query and key heads only where the family has them."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in the engine's group; `group` None is a single rank."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


def check_decodable(model: ModelConfig) -> None:
    """Raise UserError for a model with parts that this decoder does not have, by name."""
    lacking = {"experts": model.moe is not None, "latent attention": model.mla is not None, "attention sinks": model.sinks,
               f"a sliding window of {model.sliding_window}": bool(model.sliding_window and model.windowed_layers), "a bias on o_proj": model.o_bias,
               "YaRN rotary scaling": isinstance(model.rope_scaling, Yarn), f"rotation of {model.rotary_fraction} of a head": model.rotary_fraction != 1.0}
    if parts := [part for part, there in lacking.items() if there]:
        raise UserError(f"the embedded engine does not generate with {model.family} models that have {' and '.join(parts)}; it generates with "
                        "llama, mistral, qwen2 and qwen3 models without windows and YaRN. Weights of every family can be trained on stored samples "
                        "(rollout.replay), converted and synchronised")


class Decoder:
    """Forward pass over packed rows. Holds references to the engine's weights, so an update needs no reload."""

    def __init__(self, model: ModelConfig, weights: dict[str, torch.Tensor], parallel: TensorParallel, max_tokens: int) -> None:
        self._model, self._parallel = model, parallel
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = self._embedding if model.tied else weights["lm_head.weight"]
        self._norm = weights["model.norm.weight"]
        self._layers = [_layer(weights, i) for i in range(model.num_layers)]
        self.kv_heads = max(1, model.num_kv_heads // parallel.size)
        self.heads = model.num_heads // parallel.size
        self._cos, self._sin = rotary_tables(model, max_tokens, self._embedding.dtype, self._embedding.device)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Final hidden states [rows, hidden] of token `ids` [rows] at `positions` [rows]; `attention` owns the cache."""
        model, parallel = self._model, self._parallel
        x = self._embed(ids)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for index, layer in enumerate(self._layers):
            qkv = linear(rms_norm(x, layer.input_norm, model.rms_norm_eps), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(ids), self.heads + 2 * self.kv_heads, model.head_dim)
            qk = rotate(self._head_norms(qkv[:, :self.heads + self.kv_heads], layer), cos, sin)
            attended = attention(index, qk[:, :self.heads], qk[:, self.heads:], qkv[:, self.heads + self.kv_heads:])
            x = x + parallel.reduce(linear(attended.reshape(len(ids), -1), layer.o))
            gate, up = linear(rms_norm(x, layer.post_norm, model.rms_norm_eps), layer.gate_up).chunk(2, dim=-1)
            x = x + parallel.reduce(linear(F.silu(gate) * up, layer.down))
        return x

    def _head_norms(self, qk: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Norms of every query and key head [rows, heads, head_dim], where the model has them."""
        if layer.q_norm is None or layer.k_norm is None:
            return qk
        eps = self._model.rms_norm_eps
        return torch.cat([rms_norm(qk[:, :self.heads], layer.q_norm, eps), rms_norm(qk[:, self.heads:], layer.k_norm, eps)], dim=1)

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


def _layer(weights: dict[str, torch.Tensor], index: int) -> Layer:
    prefix = f"model.layers.{index}."
    return Layer(
        input_norm=weights[prefix + "input_layernorm.weight"], qkv=weights[prefix + "self_attn.qkv_proj.weight"],
        qkv_bias=weights.get(prefix + "self_attn.qkv_proj.bias"), q_norm=weights.get(prefix + "self_attn.q_norm.weight"),
        k_norm=weights.get(prefix + "self_attn.k_norm.weight"), o=weights[prefix + "self_attn.o_proj.weight"],
        post_norm=weights[prefix + "post_attention_layernorm.weight"], gate_up=weights[prefix + "mlp.gate_up_proj.weight"],
        down=weights[prefix + "mlp.down_proj.weight"])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] -> [rows, out]. Fewer than 4 rows are padded: below that CPU libraries take another kernel, whose
    rounding differs, and a request would come out differently alone than in a batch."""
    rows = x.shape[0]
    if rows >= MIN_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, MIN_ROWS - rows)), weight, bias)[:rows]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in fp32, cast back before the gain (transformers `LlamaRMSNorm`)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split convention: x [rows, heads, head_dim], cos and sin [rows, 1, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rotary_tables(model: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, head_dim / 2]."""
    exponent = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=device) / model.head_dim
    frequencies = 1.0 / model.rope_theta ** exponent
    if model.rope_scaling is not None:
        frequencies = llama3_frequencies(frequencies, model.rope_scaling)
    angles = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1 frequency scaling (transformers `modeling_rope_utils._compute_llama3_parameters`): long wavelengths are
    divided by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    blend = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
    blend = (blend / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return torch.where(wavelength > low, frequencies / scaling.factor, torch.where(wavelength < high, frequencies, between))
