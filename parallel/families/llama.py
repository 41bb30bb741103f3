"""`llama`: tied or untied head, grouped-query attention, explicit head_dim, llama3 RoPE scaling."""

from __future__ import annotations

from typing import Any

from parallel.errors import UserError
from parallel.families.base import Family, dense_decoder


def read(hf: dict[str, Any]) -> dict[str, Any]:
    if hf.get("attention_bias"):
        raise UserError("model config.json (llama): attention_bias true is not supported (it puts a bias on o_proj too)")
    return {}


FAMILY = Family("llama", "LlamaForCausalLM", read, dense_decoder)
