"""The supported model architectures, by HF `model_type`."""

from __future__ import annotations

from typing import Any

from parallel.errors import UserError, nearest
from parallel.families import deepseek_v2, deepseek_v3, glm4_moe, gpt_oss, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from parallel.families.base import Family, Parameter

FAMILIES: dict[str, Family] = {m.FAMILY.name: m.FAMILY for m in (
    llama, mistral, qwen2, qwen3, qwen2_moe, qwen3_moe, mixtral, deepseek_v2, deepseek_v3, glm4_moe, gpt_oss)}

__all__ = ["FAMILIES", "Family", "Parameter", "family_of"]


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a HF config. Raises UserError that lists the supported ones."""
    name = hf.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        guess = nearest(str(name), FAMILIES)
        raise UserError(f"model_type {name!r} is not a supported family; supported: {', '.join(sorted(FAMILIES))}"
                        + (f"; did you mean {guess!r}?" if guess else ""))
    return FAMILIES[name]
