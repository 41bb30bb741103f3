"""`gpt_oss`: attention sinks and windows on every other layer, biases everywhere, experts with a clamped SwiGLU.

HF files hold a layer's experts in one tensor, transposed, with gate and up columns interleaved. A canonical tensor of an expert
here is named as in the other families: `mlp.experts.{expert}.{gate,up,down}_proj.{weight,bias}`, [out, in].
"""

from __future__ import annotations

from typing import Any

from parallel.errors import UserError
from parallel.families.base import Family, Parameter, decoder, experts, grouped_query_attention, layers_of_type, window
from parallel.model_config import ModelConfig, MoE


def read(hf: dict[str, Any]) -> dict[str, Any]:
    if float(hf.get("swiglu_alpha", 1.702)) != 1.702:
        raise UserError(f"model config.json (gpt_oss): swiglu_alpha {hf['swiglu_alpha']} is not supported; it must be 1.702")
    if not hf.get("attention_bias", True):
        raise UserError("model config.json (gpt_oss): attention_bias false is not supported; Megatron's biases are all there or none")
    moe = MoE(int(hf["num_local_experts"]), int(hf.get("num_experts_per_tok") or hf.get("experts_per_token") or 4), int(hf["intermediate_size"]),
              tuple(range(int(hf["num_hidden_layers"]))), router_bias=True, expert_bias=True)
    return {"moe": moe, "qkv_bias": True, "o_bias": True, "sinks": True, "swiglu_limit": float(hf.get("swiglu_limit", 7.0)),
            **window(hf, layers_of_type(hf, lambda i: i % 2 == 0))}


def parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    return decoder(c, grouped_query_attention(c), experts(c, router="router"))


FAMILY = Family("gpt_oss", "GptOssForCausalLM", read, parameters, fused_experts="transposed",
                defaults={"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128,
                          "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}})
