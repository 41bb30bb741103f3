"""`deepseek_v3`: multi-head latent attention, sigmoid router with an fp32 correction bias and expert groups, shared experts,
leading dense layers. Multi-token-prediction layers (`num_nextn_predict_layers`) are recognised and refused by name by the readers."""

from __future__ import annotations

from typing import Any

from parallel.errors import UserError
from parallel.families.base import Family, Parameter, decoder, deepseek_layers, dense_mlp, experts, latent_attention, latent_sizes
from parallel.model_config import ModelConfig, MoE


def read(hf: dict[str, Any]) -> dict[str, Any]:
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if hf.get(key, only) != only:
            raise UserError(f"model config.json (deepseek_v3): {key} {hf[key]!r} is not supported; it must be {only!r}")
    moe = MoE(int(hf["n_routed_experts"]), int(hf["num_experts_per_tok"]), int(hf["moe_intermediate_size"]), deepseek_layers(hf),
              score="sigmoid", normalize=bool(hf.get("norm_topk_prob", True)), scaling=float(hf.get("routed_scaling_factor", 2.5)),
              groups=int(hf.get("n_group", 8)), top_groups=int(hf.get("topk_group", 4)), correction_bias=True,
              shared_intermediate_size=int(hf.get("n_shared_experts") or 0) * int(hf["moe_intermediate_size"]))
    return {"moe": moe, **latent_sizes(hf)}


def parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    return decoder(c, latent_attention(c), dense_mlp(c), experts(c))


FAMILY = Family("deepseek_v3", "DeepseekV3ForCausalLM", read, parameters)
