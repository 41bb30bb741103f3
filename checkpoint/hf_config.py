"""The files beside the weights of a Hugging Face directory: `config.json` and what travels with the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from parallel.families import FAMILIES
from parallel.model_config import ModelConfig

COMPANIONS = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "vocab*", "merges*",
              "*.tiktoken", "LICENSE*")


def hf_config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """`config.json` of the model: the one it was read from, with what the model knows written over it.

    The rotary base is written both where transformers 5 looks (`rope_parameters`) and where older readers do (`rope_theta`,
    and `rope_scaling` where there is scaling); `dtype` likewise with `torch_dtype`.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    out = dict(model.hf)
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        rope = {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings}
        out["rope_scaling"] = dict(rope)
    out.setdefault("architectures", [FAMILIES[model.family].architecture])
    out.setdefault("hidden_act", "silu")
    out.update(
        model_type=model.family, hidden_size=model.hidden_size, intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads, num_key_value_heads=model.num_kv_heads,
        vocab_size=model.vocab_size, max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.rms_norm_eps, tie_word_embeddings=model.tied, rope_theta=model.rope_theta,
        rope_parameters={**rope, "rope_theta": model.rope_theta}, dtype=dtype, torch_dtype=dtype,
    )
    if "head_dim" in out or model.head_dim * model.num_heads != model.hidden_size:
        out["head_dim"] = model.head_dim
    if "bos_token_id" not in out and model.bos_token_id is not None:
        out["bos_token_id"] = model.bos_token_id
    if "eos_token_id" not in out and model.eos_token_ids:
        out["eos_token_id"] = model.eos_token_ids[0] if len(model.eos_token_ids) == 1 else list(model.eos_token_ids)
    return out


def write_companions(directory: Path, model: ModelConfig, dtype: str, source: str | Path | None) -> None:
    """Write `config.json`, and copy tokenizer, chat template and generation settings from `source`."""
    (directory / "config.json").write_text(json.dumps(hf_config(model, dtype), indent=2) + "\n")
    if source is None:
        return
    for pattern in COMPANIONS:
        for file in sorted(Path(source).glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)
