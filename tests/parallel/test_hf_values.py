"""A wrong value in config.json is refused with its key before anything computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from parallel.model_config import ModelConfig

DEEPSEEK: dict[str, Any] = dict(
    model_type="deepseek_v3", hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=203, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=32, n_group=4, topk_group=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
    v_head_dim=8, rope_theta=10000.0)
QWEN: dict[str, Any] = dict(model_type="qwen3_moe", hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=203,
                            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, rope_theta=10000.0)


@pytest.mark.parametrize(("base", "key", "value"), [
    (QWEN, "hidden_size", "x"), (QWEN, "hidden_size", None), (QWEN, "moe_intermediate_size", None), (QWEN, "vocab_size", 1.5),
    (QWEN, "num_experts", 0), (QWEN, "decoder_sparse_step", 0), (QWEN, "mlp_only_layers", "x"), (QWEN, "mlp_only_layers", [99]),
    (QWEN, "tie_word_embeddings", "yes"), (QWEN, "quantization_config", "x"), (QWEN, "rope_scaling", "x"), (QWEN, "num_attention_heads", True),
    (DEEPSEEK, "kv_lora_rank", None), (DEEPSEEK, "topk_group", 9), (DEEPSEEK, "first_k_dense_replace", 9), (DEEPSEEK, "first_k_dense_replace", -1),
    (DEEPSEEK, "num_nextn_predict_layers", -1), (DEEPSEEK, "rms_norm_eps", "small"), (QWEN, "model_type", ["qwen3"])])
def test_a_value_of_a_wrong_kind_is_refused_with_its_key(base: dict[str, Any], key: str, value: Any) -> None:
    ModelConfig.from_hf(base)
    with pytest.raises(UserError, match=key):
        ModelConfig.from_hf({**base, key: value})


@pytest.mark.parametrize("content", [b"[1]", b"\xff\xfe\x00", b"{", b""])
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match="config.json"):
        ModelConfig.from_directory(tmp_path)
