"""`qwen2`: as llama, with a bias on q, k and v (and none on o)."""

from __future__ import annotations

from typing import Any

from parallel.families.base import Family, dense_decoder, qwen_window


def read(hf: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, **qwen_window(hf)}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, dense_decoder, defaults={"num_key_value_heads": 32})
