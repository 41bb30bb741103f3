"""What the values of a Hugging Face `config.json` must be, so that a wrong one is named before anything computes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel.errors import UserError

# the least that each may be; where None may stand for "not given" the family's reader says what it means
COUNTS = {
    "hidden_size": 1, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 1, "intermediate_size": 1, "num_key_value_heads": 1,
    "head_dim": 1, "max_position_embeddings": 1, "num_experts": 1, "num_local_experts": 1, "n_routed_experts": 1, "num_experts_per_tok": 1,
    "experts_per_token": 1, "moe_intermediate_size": 1, "shared_expert_intermediate_size": 1, "n_shared_experts": 0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "decoder_sparse_step": 1, "num_nextn_predict_layers": 0, "q_lora_rank": 1, "kv_lora_rank": 1,
    "qk_nope_head_dim": 1, "qk_rope_head_dim": 1, "v_head_dim": 1, "sliding_window": 0, "max_window_layers": 0,
}
NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range", "routed_scaling_factor", "partial_rotary_factor", "swiglu_limit")
SWITCHES = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "use_sliding_window", "use_qk_norm", "mlp_bias", "qkv_bias")
TABLES = ("rope_scaling", "rope_parameters", "quantization_config")
LISTS = ("mlp_only_layers", "layer_types")
REQUIRED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank",
            "n_routed_experts", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_local_experts")


def read_config(path: str | Path) -> dict[str, Any]:
    """A `config.json` as a dictionary. Raises UserError where it cannot be read as one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, not an object; give the config.json of a Hugging Face model")
    return data


def check_values(hf: dict[str, Any]) -> None:
    """Raise UserError that names the key and the value where a value cannot be what its key means."""
    for key, least in COUNTS.items():
        value = hf.get(key)
        if key in hf and value is None and key in REQUIRED:
            raise _wrong(key, value, f"a whole number of at least {least}")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise _wrong(key, value, f"a whole number of at least {least}")
    kinds = ((NUMBERS, (int, float), "a number"), (SWITCHES, bool, "true or false"), (TABLES, dict, "an object"), (LISTS, list, "a list"))
    for keys, kind, words in kinds:
        for key in keys:
            value = hf.get(key)
            if value is not None and (not isinstance(value, kind) or (kind != bool and isinstance(value, bool))):
                raise _wrong(key, value, words)
    _check_layers(hf)


def _check_layers(hf: dict[str, Any]) -> None:
    layers = hf.get("num_hidden_layers") or 0
    if (hf.get("first_k_dense_replace") or 0) > layers:
        raise _wrong("first_k_dense_replace", hf["first_k_dense_replace"], f"at most num_hidden_layers {layers}")
    if outside := [i for i in hf.get("mlp_only_layers") or () if not isinstance(i, int) or not 0 <= i < layers]:
        raise _wrong("mlp_only_layers", outside, f"layers of the model, 0 to {layers - 1}")
    if hf.get("n_group") and (hf.get("topk_group") or 0) > hf["n_group"]:
        raise _wrong("topk_group", hf["topk_group"], f"at most n_group {hf['n_group']}")


def _wrong(key: str, value: Any, allowed: str) -> UserError:
    return UserError(f"model config.json: {key} is {json.dumps(value, default=repr)}; it must be {allowed}")
