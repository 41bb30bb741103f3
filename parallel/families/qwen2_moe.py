"""`qwen2_moe`: qwen2 with routed experts and one shared expert behind a sigmoid gate."""

from __future__ import annotations

from typing import Any

from parallel.families.base import Family, Parameter, decoder, dense_mlp, experts, grouped_query_attention, layers_of_type, qwen_moe_layers, window
from parallel.model_config import ModelConfig, MoE


def read(hf: dict[str, Any]) -> dict[str, Any]:
    moe = MoE(int(hf.get("num_experts", 60)), int(hf.get("num_experts_per_tok", 4)), int(hf["moe_intermediate_size"]), qwen_moe_layers(hf),
              normalize=bool(hf.get("norm_topk_prob", False)), shared_intermediate_size=int(hf["shared_expert_intermediate_size"]),
              shared_gate=True)
    last = int(hf.get("max_window_layers", 28))  # every other layer below it, where qwen2 has those from it on
    windows = window(hf, layers_of_type(hf, lambda i: i % 2 == 0 and i < last)) if hf.get("use_sliding_window") else {}
    return {"qkv_bias": bool(hf.get("qkv_bias", True)), "moe": moe, **windows}


def parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    return decoder(c, grouped_query_attention(c), dense_mlp(c), experts(c, shared="shared_expert"))


FAMILY = Family("qwen2_moe", "Qwen2MoeForCausalLM", read, parameters, defaults={"num_key_value_heads": 16})
