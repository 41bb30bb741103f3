"""`qwen2`: as llama, with a bias on q, k and v (and none on o)."""

from __future__ import annotations

from typing import Any

from parallel.errors import UserError
from parallel.families.base import Family, decoder_parameters


def read(hf: dict[str, Any]) -> dict[str, Any]:
    if hf.get("use_sliding_window"):
        raise UserError("model config.json (qwen2): use_sliding_window true is not supported; set it to false for full attention")
    return {"qkv_bias": True}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, decoder_parameters)
