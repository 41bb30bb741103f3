"""`deepseek_v2`: multi-head latent attention, with the query compressed or not; softmax router, shared experts, leading dense layers."""

from __future__ import annotations

from typing import Any

from parallel.errors import UserError
from parallel.families.base import Family, Parameter, decoder, deepseek_layers, dense_mlp, experts, latent_attention, latent_sizes
from parallel.model_config import ModelConfig, MoE


def read(hf: dict[str, Any]) -> dict[str, Any]:
    method = hf.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"model config.json (deepseek_v2): topk_method {method!r} is not supported; supported: greedy, group_limited_greedy")
    if hf.get("scoring_func", "softmax") != "softmax":
        raise UserError(f"model config.json (deepseek_v2): scoring_func {hf['scoring_func']!r} is not supported; it must be 'softmax'")
    grouped = method == "group_limited_greedy"
    moe = MoE(int(hf["n_routed_experts"]), int(hf["num_experts_per_tok"]), int(hf["moe_intermediate_size"]), deepseek_layers(hf),
              normalize=False,  # transformers' deepseek_v2 does not read norm_topk_prob
              scaling=float(hf.get("routed_scaling_factor", 1.0)),
              groups=int(hf["n_group"]) if grouped else None, top_groups=int(hf["topk_group"]) if grouped else None,
              shared_intermediate_size=int(hf.get("n_shared_experts") or 0) * int(hf["moe_intermediate_size"]))
    return {"moe": moe, **latent_sizes(hf)}


def parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    return decoder(c, latent_attention(c), dense_mlp(c), experts(c))


FAMILY = Family("deepseek_v2", "DeepseekV2ForCausalLM", read, parameters)
