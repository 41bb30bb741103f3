"""`gpt_oss`: attention sinks and windows on every other layer, biases everywhere, experts with a clamped SwiGLU.

HF files hold a layer's experts in one tensor, transposed, with gate and up columns interleaved. A canonical tensor of an expert
here is named as in the other families: `mlp.experts.{expert}.{gate,up,down}_proj.{weight,bias}`, [out, in].
"""

from __future__ import annotations

from typing import Any

from parallel.families.base import Family, Parameter, decoder, experts, grouped_query_attention
from parallel.model_config import ModelConfig, MoE


def read(hf: dict[str, Any]) -> dict[str, Any]:
    moe = MoE(int(hf["num_local_experts"]), int(hf.get("num_experts_per_tok") or hf.get("experts_per_token") or 4), int(hf["intermediate_size"]),
              tuple(range(int(hf["num_hidden_layers"]))), router_bias=True, expert_bias=True)
    bias = bool(hf.get("attention_bias", True))
    return {"moe": moe, "qkv_bias": bias, "o_bias": bias, "sinks": True, "swiglu_limit": float(hf.get("swiglu_limit", 7.0))}


def parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    return decoder(c, grouped_query_attention(c), experts(c, router="router"))


FAMILY = Family("gpt_oss", "GptOssForCausalLM", read, parameters, fused_experts="transposed")
