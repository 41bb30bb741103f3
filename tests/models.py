"""Small random Hugging Face models of every family for tests, written as directories, and the reference logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=203, max_position_embeddings=256, rms_norm_eps=1e-5, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0)

_LATENT = dict(num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
_SHARED = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2, first_k_dense_replace=1)
# what a family needs beside TINY: small, and every part of it at work
FAMILY_TINY: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": dict(sliding_window=5), "qwen2": {}, "qwen3": dict(head_dim=24),
    "qwen2_moe": dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=48, mlp_only_layers=[1]),
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, head_dim=24, norm_topk_prob=True),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": dict(_LATENT, **_SHARED, rope_parameters=dict(YARN, mscale=0.707, mscale_all_dim=0.707), routed_scaling_factor=1.5),
    "deepseek_v3": dict(_LATENT, **_SHARED, n_group=4, topk_group=2, num_nextn_predict_layers=0,
                        rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0)),
    "glm4_moe": dict(_SHARED, n_group=2, topk_group=1, head_dim=16, use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.0,
                     num_nextn_predict_layers=0, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=3, head_dim=16, sliding_window=5,
                    rope_parameters=dict(YARN, rope_theta=150000.0, truncate=False)),
}


def write_model(directory: str | Path, family: str = "llama", seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """Write a random model of `family` to `directory` and return it. `changes` override TINY and the family's own FAMILY_TINY.

    Norms, biases, sinks and router correction biases are not trivial: each changes the logits.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**TINY, **FAMILY_TINY[family], **changes})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            torch.nn.init.normal_(tensor, mean=1.0, std=0.1)
        elif name.endswith(("bias", "proj_bias", "sinks")):
            torch.nn.init.normal_(tensor, std=0.1)
    torch.random.set_rng_state(state)
    model.to(getattr(torch, dtype))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # published models keep it in float32
            buffer.data = buffer.data.float()
    model.save_pretrained(directory)
    return Path(directory)


def reference_logits(directory: str | Path, ids: list[list[int]]) -> Any:
    """Logits of transformers in fp32, [sequences, tokens, vocab]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(ids)).logits
