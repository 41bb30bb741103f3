"""The supported model architectures, by HF `model_type`."""

from __future__ import annotations

from typing import Any

from parallel.errors import UserError
from parallel.families import llama, qwen2
from parallel.families.base import Family, Parameter

FAMILIES: dict[str, Family] = {m.FAMILY.name: m.FAMILY for m in (llama, qwen2)}

__all__ = ["FAMILIES", "Family", "Parameter", "family_of"]


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a HF config. Raises UserError that lists the supported ones."""
    name = hf.get("model_type")
    if name not in FAMILIES:
        raise UserError(f"model_type {name!r} is not a supported family; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]
