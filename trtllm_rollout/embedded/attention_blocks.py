"""The attention of one layer up to and after its core: grouped-query attention, and multi-head latent attention in absorbed form.

Each takes rows and gives this tensor-parallel rank's part of the sum over ranks. What keys a query sees, window, sinks and scale are
the business of `attend`, which the engine gives; a layer only states them (`Heads`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel.layers import LATENT_NORM_EPS
from parallel.model_config import MLA, ModelConfig
from parallel.rope import softmax_scale
from trtllm_rollout.embedded.heads import Heads
from trtllm_rollout.embedded.linear import LayerTensors, Linear, by_head, linear, rms_norm
from trtllm_rollout.embedded.rotary import rotate_

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class GroupedQuery:
    """`qkv` holds this rank's [q; k; v] heads; `q_norm` and `k_norm` [head_dim] only where the family has them."""

    heads: Heads
    qkv: Linear
    o: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    rotated: int

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]."""
        queries, both = self.heads.queries, self.heads.queries + self.heads.kv
        qkv = linear(x, self.qkv).view(len(x), both + self.heads.kv, self.heads.key_dim)
        qk = qkv[:, :both]
        if self.q_norm is not None and self.k_norm is not None:
            qk = rms_norm(qk, torch.cat([self.q_norm.expand(queries, -1), self.k_norm.expand(self.heads.kv, -1)]), self.eps)
        rotate_(qk[..., :self.rotated], cos, sin)
        return linear(attend(qk[:, :queries], qk[:, queries:], qkv[:, both:]).flatten(1), self.o)


@dataclass(frozen=True)
class Latent:
    """`down` compresses keys and values (and the query, above them, where `q_norm` is there), `up` expands them by head.

    Source: DeepSeek-V2, arXiv:2405.04434, 2.1; transformers `modeling_deepseek_v3`. Keys stay compressed: the part of `up` that makes a
    head's keys is applied to its query instead, and the part that makes its values to what attention gives.
    """

    heads: Heads
    mla: MLA
    down: Linear
    q: Linear
    up: Linear
    o: Linear
    q_norm: torch.Tensor | None
    kv_norm: torch.Tensor

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]."""
        m, rank, queries = self.mla, self.mla.kv_lora_rank, self.heads.queries
        latent = linear(x, self.down)
        if self.q_norm is None:
            q = linear(x, self.q)
        else:
            q = linear(rms_norm(latent[:, :m.q_lora_rank], self.q_norm, LATENT_NORM_EPS), self.q)
            latent = latent[:, m.q_lora_rank:]
        q = q.view(len(x), queries, m.qk_nope_head_dim + m.qk_rope_head_dim)
        up = self.up.in_dtype(x.dtype).view(queries, m.qk_nope_head_dim + m.v_head_dim, rank)
        query = torch.cat([by_head(q[..., :m.qk_nope_head_dim], up[:, :m.qk_nope_head_dim]), q[..., m.qk_nope_head_dim:]], -1)
        key = torch.cat([rms_norm(latent[:, :rank], self.kv_norm, LATENT_NORM_EPS), latent[:, rank:]], -1)[:, None]
        rotate_(query[..., rank:], cos, sin, side_by_side=True)
        rotate_(key[..., rank:], cos, sin, side_by_side=True)
        values = by_head(attend(query, key, None), up[:, m.qk_nope_head_dim:].transpose(1, 2))
        return linear(values.flatten(1), self.o)


def attention_block(model: ModelConfig, layer: LayerTensors, index: int, tp: int, tp_rank: int) -> GroupedQuery | Latent:
    """The attention of decoder layer `index` on rank `tp_rank` of `tp`."""
    window = model.sliding_window if index in model.windowed_layers else None
    queries, o = model.num_heads // tp, layer.linear("self_attn.o_proj", bias=tp_rank == 0)  # one rank's bias is in the sum over all
    if model.mla is None:
        heads = Heads(queries, max(1, model.num_kv_heads // tp), model.head_dim, model.head_dim, softmax_scale(model), window,
                      layer.get("self_attn.sinks"))
        return GroupedQuery(heads, layer.linear("self_attn.qkv_proj"), o, layer.get("self_attn.q_norm.weight"),
                            layer.get("self_attn.k_norm.weight"), model.rms_norm_eps, int(model.head_dim * model.rotary_fraction))
    heads = Heads(queries, 1, model.mla.kv_lora_rank + model.mla.qk_rope_head_dim, model.mla.kv_lora_rank, softmax_scale(model), window, latent=True)
    query = layer.first("self_attn.q_b_proj.weight", "self_attn.q_proj.weight").removesuffix(".weight")
    return Latent(heads, model.mla, layer.linear("self_attn.kv_a_proj_with_mqa"), layer.linear(query), layer.linear("self_attn.kv_b_proj"), o,
                  layer.get("self_attn.q_a_layernorm.weight"), layer["self_attn.kv_a_layernorm.weight"])
