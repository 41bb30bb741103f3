"""`qwen3_moe`: qwen3 with routed experts."""

from __future__ import annotations

from typing import Any

from parallel.families.base import (
    Family,
    Parameter,
    decoder,
    dense_mlp,
    experts,
    grouped_query_attention,
    qwen_moe_layers,
    refuse_attention_bias,
    window,
)
from parallel.model_config import ModelConfig, MoE


def read(hf: dict[str, Any]) -> dict[str, Any]:
    refuse_attention_bias(hf)
    moe = MoE(int(hf.get("num_experts") or hf.get("num_local_experts") or 128), int(hf.get("num_experts_per_tok", 8)),
              int(hf["moe_intermediate_size"]), qwen_moe_layers(hf), normalize=bool(hf.get("norm_topk_prob", False)))
    return {"qk_norm": True, "moe": moe, **(window(hf) if hf.get("use_sliding_window") else {})}


def parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    return decoder(c, grouped_query_attention(c), dense_mlp(c), experts(c))


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, parameters, defaults={"num_key_value_heads": 4})
