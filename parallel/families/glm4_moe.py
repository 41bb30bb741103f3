"""`glm4_moe`: grouped-query attention with partial rotation, optional biases and qk-norms; the router and experts of deepseek_v3."""

from __future__ import annotations

from typing import Any

from parallel.families.base import Family, Parameter, decoder, deepseek_layers, dense_mlp, experts, grouped_query_attention
from parallel.model_config import ModelConfig, MoE


def read(hf: dict[str, Any]) -> dict[str, Any]:
    moe = MoE(int(hf["n_routed_experts"]), int(hf["num_experts_per_tok"]), int(hf["moe_intermediate_size"]), deepseek_layers(hf),
              score="sigmoid", normalize=bool(hf.get("norm_topk_prob", True)), scaling=float(hf.get("routed_scaling_factor", 1.0)),
              groups=int(hf.get("n_group", 1)), top_groups=int(hf.get("topk_group", 1)), correction_bias=True,
              shared_intermediate_size=int(hf.get("n_shared_experts") or 0) * int(hf["moe_intermediate_size"]))
    rotary = (hf.get("rope_parameters") or {}).get("partial_rotary_factor", hf.get("partial_rotary_factor", 0.5))
    return {"moe": moe, "qkv_bias": bool(hf.get("attention_bias", False)), "qk_norm": bool(hf.get("use_qk_norm", False)),
            "rotary_fraction": float(rotary)}


def parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    return decoder(c, grouped_query_attention(c), dense_mlp(c), experts(c))


FAMILY = Family("glm4_moe", "Glm4MoeForCausalLM", read, parameters, defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8})
