"""`qwen3`: as llama, with RMSNorm on every query and key head."""

from __future__ import annotations

from typing import Any

from parallel.families.base import Family, dense_decoder, qwen_window, refuse_attention_bias


def read(hf: dict[str, Any]) -> dict[str, Any]:
    refuse_attention_bias(hf)
    return {"qk_norm": True, "head_dim": int(hf.get("head_dim") or 128), **qwen_window(hf)}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, dense_decoder, defaults={"num_key_value_heads": 32})
