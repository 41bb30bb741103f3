"""`mistral`: as llama, with a sliding window in every layer where config.json gives one."""

from __future__ import annotations

from typing import Any

from parallel.families.base import Family, dense_decoder, window


def read(hf: dict[str, Any]) -> dict[str, Any]:
    return window(hf)


FAMILY = Family("mistral", "MistralForCausalLM", read, dense_decoder, defaults={"num_key_value_heads": 8, "sliding_window": 4096})
