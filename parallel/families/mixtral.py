"""`mixtral`: llama with routed experts in every layer; their matrices are called w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from typing import Any

from parallel.families.base import Family, Parameter, decoder, experts, grouped_query_attention, window
from parallel.model_config import ModelConfig, MoE


def read(hf: dict[str, Any]) -> dict[str, Any]:
    return {"moe": MoE(int(hf["num_local_experts"]), int(hf.get("num_experts_per_tok", 2)), int(hf["intermediate_size"]),
                       tuple(range(int(hf["num_hidden_layers"])))), **window(hf)}


def parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    return decoder(c, grouped_query_attention(c), experts(c, "block_sparse_moe", ("w1", "w3", "w2")))


FAMILY = Family("mixtral", "MixtralForCausalLM", read, parameters,
                defaults={"num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6})
