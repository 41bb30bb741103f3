"""The files beside the weights of a Hugging Face directory: `config.json` and what travels with the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from parallel.families import FAMILIES
from parallel.model_config import ModelConfig, RopeScaling, Yarn

COMPANIONS = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "vocab*", "merges*",
              "*.tiktoken", "configuration_*.py", "modeling_*.py", "tokenization_*.py", "LICENSE*")
# the families' own words for the number of routed experts
_EXPERTS = {"qwen2_moe": "num_experts", "qwen3_moe": "num_experts", "mixtral": "num_local_experts", "gpt_oss": "num_local_experts",
            "deepseek_v2": "n_routed_experts", "deepseek_v3": "n_routed_experts", "glm4_moe": "n_routed_experts"}
_LAYER_TYPES = ("qwen2", "qwen3", "qwen2_moe", "gpt_oss")  # transformers reads `layer_types` of these
_USE_WINDOW = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")  # and the window of these only with `use_sliding_window`


def hf_config(model: ModelConfig, dtype: str, quantised: bool = False) -> dict[str, Any]:
    """`config.json` of the model: the one it was read from where that says this model, else with what the model knows written over it.

    The rotary base and scaling are written both where transformers 5 looks (`rope_parameters`) and where older readers do
    (`rope_theta`, `rope_scaling`); `dtype` likewise with `torch_dtype`. `quantization_config` stays only where the files are
    `quantised`. Layers for multi-token prediction are never written, so their number is 0.
    """
    out = dict(model.hf)
    if not quantised:
        out.pop("quantization_config", None)
    same = _says(model.hf, model)
    if not same:
        out.update(_sizes(model, "head_dim" in out))
    out.setdefault("architectures", [FAMILIES[model.family].architecture])
    if model.head == "value" and not same:
        out.update(architectures=[FAMILIES[model.family].architecture.replace("ForCausalLM", "ForSequenceClassification")],
                   id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    out.setdefault("hidden_act", "silu")
    out.update(_rope(model, model.hf if same else {}), dtype=dtype, torch_dtype=dtype)
    if out.get("rope_scaling") and model.rope_scaling is None:
        del out["rope_scaling"]
    if "bos_token_id" not in out and model.bos_token_id is not None:
        out["bos_token_id"] = model.bos_token_id
    if "eos_token_id" not in out and model.eos_token_ids:
        out["eos_token_id"] = model.eos_token_ids[0] if len(model.eos_token_ids) == 1 else list(model.eos_token_ids)
    if model.family in ("deepseek_v3", "glm4_moe"):
        out.pop("num_mtp_layers", None)
        out["num_nextn_predict_layers"] = 0
    return out


def _says(hf: dict[str, Any], model: ModelConfig) -> bool:
    """Whether a config describes the model as it is; it is then left alone, with every word of its own."""
    return bool(hf) and ModelConfig.from_hf(hf, dtype=model.dtype, make_vocab_size_divisible_by=model.make_vocab_size_divisible_by) == model


def _sizes(model: ModelConfig, head_dim: bool) -> dict[str, Any]:
    return {
        "model_type": model.family, "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size, "max_position_embeddings": model.max_position_embeddings, "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tied, "initializer_range": model.init_std,
        **_attention(model, head_dim), **_window(model), **_experts(model),
    }


def _rope(model: ModelConfig, source: dict[str, Any]) -> dict[str, Any]:
    """Rotary base and scaling in both places; `source` is a config that says the same and may say more."""
    scaling: dict[str, Any] = {}
    if isinstance(model.rope_scaling, (RopeScaling, Yarn)):
        said = source.get("rope_scaling") or source.get("rope_parameters") or {}
        kind = "yarn" if isinstance(model.rope_scaling, Yarn) else "llama3"
        scaling = {**(said or {k: v for k, v in vars(model.rope_scaling).items() if v is not None}), "rope_type": kind}
    new = {"rope_type": "default", **scaling, "rope_theta": model.rope_theta}
    out: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_parameters": new}
    if scaling:
        out["rope_scaling"] = {key: value for key, value in scaling.items() if key != "rope_theta"}
    if model.family == "glm4_moe":
        new["partial_rotary_factor"] = out["partial_rotary_factor"] = model.rotary_fraction
    return out


def _attention(model: ModelConfig, head_dim: bool) -> dict[str, Any]:
    """Sizes of heads and switches of biases and norms, in the words of the family."""
    if m := model.mla:
        return {"q_lora_rank": m.q_lora_rank, "kv_lora_rank": m.kv_lora_rank, "qk_nope_head_dim": m.qk_nope_head_dim,
                "qk_rope_head_dim": m.qk_rope_head_dim, "v_head_dim": m.v_head_dim, "head_dim": m.qk_rope_head_dim}
    out: dict[str, Any] = {}
    if head_dim or model.head_dim * model.num_heads != model.hidden_size or model.family in ("qwen3", "gpt_oss"):
        out["head_dim"] = model.head_dim
    if model.family in ("glm4_moe", "gpt_oss"):
        out["attention_bias"] = model.qkv_bias
    if model.family == "glm4_moe":
        out["use_qk_norm"] = model.qk_norm
    if model.family == "qwen2_moe":
        out["qkv_bias"] = model.qkv_bias
    if model.swiglu_limit is not None:
        out["swiglu_limit"] = model.swiglu_limit
    return out


def _window(model: ModelConfig) -> dict[str, Any]:
    """The sliding window, or the absence of one: some families have one by default."""
    out: dict[str, Any] = {}
    windowed = model.sliding_window is not None
    if model.family in _USE_WINDOW:
        out["use_sliding_window"] = windowed
    if windowed or model.family in ("mistral", "mixtral", "gpt_oss"):
        out["sliding_window"] = model.sliding_window
    if model.family in _LAYER_TYPES:
        out["layer_types"] = ["sliding_attention" if i in model.windowed_layers else "full_attention" for i in range(model.num_layers)]
    if windowed and model.family in ("qwen2", "qwen3"):
        out["max_window_layers"] = min(model.windowed_layers, default=model.num_layers)  # for readers that do not know `layer_types`
    return out


def _experts(model: ModelConfig) -> dict[str, Any]:
    m = model.moe
    if m is None:
        return {}
    out: dict[str, Any] = {_EXPERTS[model.family]: m.num_experts, "num_experts_per_tok": m.top_k}
    if model.family in ("mixtral", "gpt_oss"):
        return {**out, "intermediate_size": m.intermediate_size}
    out.update(moe_intermediate_size=m.intermediate_size, norm_topk_prob=m.normalize)
    dense = sorted(set(range(model.num_layers)) - model.moe_layers)
    if model.family in ("qwen2_moe", "qwen3_moe"):
        out.update(decoder_sparse_step=1, mlp_only_layers=dense)
        return {**out, "shared_expert_intermediate_size": m.shared_intermediate_size} if m.shared_gate else out
    out.update(first_k_dense_replace=len(dense), n_shared_experts=m.shared_intermediate_size // m.intermediate_size,
               routed_scaling_factor=m.scaling, n_group=m.groups or 1, topk_group=m.top_groups or 1)
    if model.family == "deepseek_v2":
        out.update(topk_method="group_limited_greedy" if m.groups else "greedy", scoring_func="softmax")
    elif model.family == "deepseek_v3":
        out.update(topk_method="noaux_tc", scoring_func="sigmoid")
    return out


def write_companions(directory: Path, model: ModelConfig, dtype: str, source: str | Path | None, quantised: bool = False) -> None:
    """Write `config.json`, and copy tokenizer, chat template and generation settings from `source`."""
    (directory / "config.json").write_text(json.dumps(hf_config(model, dtype, quantised), indent=2) + "\n")
    if source is None:
        return
    for pattern in COMPANIONS:
        for file in sorted(Path(source).glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)
