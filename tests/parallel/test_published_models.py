"""Published architectures: their parameters, counted here by hand, are those that the families declare; real configs can be read."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from parallel.families import FAMILIES
from parallel.model_config import ModelConfig
from resharding.layout import canonical_shapes
from tests.conftest import SHARED


def grouped(h: int, heads: int, kv: int, d: int) -> int:
    """q, k, v and o."""
    return h * heads * d * 2 + h * kv * d * 2


def latent(h: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, v: int) -> int:
    """Down and up projections with their norms, and o."""
    return h * q_rank + q_rank + q_rank * heads * (nope + rope) + h * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + v) + heads * v * h


V3 = dict(
    model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128,
    num_key_value_heads=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, n_group=8, topk_group=4,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, vocab_size=129280, rope_theta=10000,
    num_nextn_predict_layers=1, routed_scaling_factor=2.5, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc",
    rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0))
MODELS: dict[str, tuple[dict[str, Any], int, float]] = {  # config.json, parameters, billions as published
    "Qwen3-235B-A22B": (
        dict(model_type="qwen3_moe", hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
             num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
             decoder_sparse_step=1, mlp_only_layers=[], vocab_size=151936, rope_theta=1e6, tie_word_embeddings=False),
        94 * (grouped(4096, 64, 4, 128) + 2 * 128 + 2 * 4096 + 128 * 4096 + 128 * 3 * 4096 * 1536) + 2 * 151936 * 4096 + 4096, 235.09),
    "Qwen3-30B-A3B": (
        dict(model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
             num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936, rope_theta=1e6),
        48 * (grouped(2048, 32, 4, 128) + 2 * 128 + 2 * 2048 + 128 * 2048 + 128 * 3 * 2048 * 768) + 2 * 151936 * 2048 + 2048, 30.53),
    "DeepSeek-V3 without its multi-token-prediction layer": (
        V3, 61 * (latent(7168, 128, 1536, 512, 128, 64, 128) + 2 * 7168) + 3 * 3 * 7168 * 18432
        + 58 * (256 * 7168 + 256 + 257 * 3 * 7168 * 2048) + 2 * 129280 * 7168 + 7168, 671.03),
    "DeepSeek-V2-Lite": (
        dict(model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
             num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
             q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, vocab_size=102400, rope_theta=10000),
        27 * (2048 * 16 * 192 + 2048 * (512 + 64) + 512 + 512 * 16 * 256 + 16 * 128 * 2048 + 2 * 2048) + 3 * 2048 * 10944
        + 26 * (64 * 2048 + 66 * 3 * 2048 * 1408) + 2 * 102400 * 2048 + 2048, 15.71),
    "Mixtral-8x7B": (
        dict(model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
             num_local_experts=8, num_experts_per_tok=2, vocab_size=32000, rope_theta=1e6),
        32 * (grouped(4096, 32, 8, 128) + 2 * 4096 + 8 * 4096 + 8 * 3 * 4096 * 14336) + 2 * 32000 * 4096 + 4096, 46.70),
    "gpt-oss-20b": (
        dict(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8,
             head_dim=64, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088, rope_theta=150000),
        24 * (grouped(2880, 64, 8, 64) + (64 + 2 * 8) * 64 + 2880 + 64 + 2 * 2880 + 32 * 2880 + 32 + 32 * (3 * 2880 * 2880 + 3 * 2880))
        + 2 * 201088 * 2880 + 2880, 20.91),
    "GLM-4.5-Air": (
        dict(model_type="glm4_moe", hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=46,
             num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
             first_k_dense_replace=1, attention_bias=True, use_qk_norm=False, vocab_size=151552, partial_rotary_factor=0.5, rope_theta=1e6),
        46 * (grouped(4096, 96, 8, 128) + (96 + 16) * 128 + 2 * 4096) + 3 * 4096 * 10944 + 45 * (128 * 4096 + 128 + 129 * 3 * 4096 * 1408)
        + 2 * 151552 * 4096 + 4096, 106.85),
    "Qwen1.5-MoE-A2.7B": (
        dict(model_type="qwen2_moe", hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
             num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
             vocab_size=151936, rope_theta=1e6),
        24 * (grouped(2048, 16, 16, 128) + 3 * 2048 + 2 * 2048 + 60 * 2048 + 60 * 3 * 2048 * 1408 + 3 * 2048 * 5632 + 2048)
        + 2 * 151936 * 2048 + 2048, 14.32),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_counted_by_hand(name: str) -> None:
    config, count, billions = MODELS[name]
    total = sum(math.prod(shape) for shape in canonical_shapes(ModelConfig.from_hf(config)).values())
    assert total == count and round(total / 1e9, 2) == billions


def test_published_configs_can_be_read() -> None:
    """Every real config.json at hand of a supported family, its quantisation aside (where none is at hand the models above stand for them)."""
    for path in sorted((SHARED / "assets/configs").glob("*.json")):
        config = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("quantization_config", "compression_config")}
        if config["model_type"] in FAMILIES:
            model = ModelConfig.from_hf(config)
            shapes = canonical_shapes(model)
            assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"]), path.name
            assert sum(name.endswith("input_layernorm.weight") for name in shapes) == config["num_hidden_layers"], path.name
