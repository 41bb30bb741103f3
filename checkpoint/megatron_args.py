"""A model's architecture in Megatron's words: the saved arguments of Megatron-LM, the `model` section of Megatron-Bridge's run_config.yaml.

Both name the fields of megatron-core's TransformerConfig; where Megatron-LM's arguments differ, `_LM` says so. Sources: Megatron-LM
`megatron/training/{arguments,checkpointing}.py`, Megatron-Bridge `models/{gpt_provider,mla_provider}.py` and `conversion/model_bridge.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from parallel.errors import UserError
from parallel.model_config import ModelConfig, RopeScaling, Yarn

logger = logging.getLogger(__name__)

_LM = {"num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon", "gated_linear_unit": "swiglu"}
# what a configuration and saved arguments must agree on
_COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "num_query_groups", "ffn_hidden_size", "rotary_base",
             "layernorm_epsilon", "share_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "num_moe_experts", "moe_ffn_hidden_size",
             "moe_router_topk", "moe_shared_expert_intermediate_size", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
             "qk_pos_emb_head_dim", "v_head_dim")
# the fields that are computed with: (allowed, in words)
_WHOLE = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "num_query_groups", "ffn_hidden_size", "seq_length", "vocab_size",
          "padded_vocab_size", "make_vocab_size_divisible_by", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk",
          "moe_shared_expert_intermediate_size", "moe_router_num_groups", "moe_router_group_topk", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
          "qk_pos_emb_head_dim", "v_head_dim", "original_max_position_embeddings")
_REAL = ("rotary_base", "rotary_percent", "layernorm_epsilon", "init_method_std", "moe_router_topk_scaling_factor", "rotary_scaling_factor",
         "rope_scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_PATTERNS = ("moe_layer_freq", "window_attn_skip_freq")
_LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 8192)  # all but the factor is fixed in Megatron's rotary embedding


def fields_of(model: ModelConfig) -> dict[str, Any]:
    """The model in the words of TransformerConfig and GPTModel."""
    out: dict[str, Any] = dict(
        num_layers=model.num_layers, hidden_size=model.hidden_size, ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_heads, num_query_groups=model.num_kv_heads, kv_channels=model.head_dim,
        normalization="RMSNorm", layernorm_epsilon=model.rms_norm_eps, gated_linear_unit=True, add_bias_linear=model.o_bias,
        add_qkv_bias=model.qkv_bias, qk_layernorm=model.qk_norm or model.mla is not None, attention_dropout=0.0, hidden_dropout=0.0,
        init_method_std=model.init_std, share_embeddings_and_output_weights=model.tied, position_embedding_type="rope",
        rotary_base=model.rope_theta, rotary_percent=model.rotary_fraction, vocab_size=model.vocab_size,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by, seq_length=model.max_position_embeddings,
        bf16=model.dtype == "bfloat16", multi_latent_attention=model.mla is not None)
    if model.sliding_window is not None and model.windowed_layers:
        out.update(window_size=[model.sliding_window - 1, 0],
                   window_attn_skip_freq=[int(i in model.windowed_layers) for i in range(model.num_layers)])
    if model.sinks:
        out["softmax_type"] = "learnable"
    if isinstance(model.rope_scaling, RopeScaling):
        out.update(rope_scaling=True, rope_scaling_factor=model.rope_scaling.factor)
    return {**out, **_latent(model), **_experts(model)}


def _latent(model: ModelConfig) -> dict[str, Any]:
    if model.mla is None:
        return {}
    out: dict[str, Any] = dict(
        q_lora_rank=model.mla.q_lora_rank, kv_lora_rank=model.mla.kv_lora_rank, qk_head_dim=model.mla.qk_nope_head_dim,
        qk_pos_emb_head_dim=model.mla.qk_rope_head_dim, v_head_dim=model.mla.v_head_dim, rope_type="rope")
    if isinstance(model.rope_scaling, Yarn):
        yarn = model.rope_scaling
        out.update(rope_type="yarn", rotary_scaling_factor=yarn.factor, original_max_position_embeddings=yarn.original_max_position_embeddings,
                   beta_fast=yarn.beta_fast, beta_slow=yarn.beta_slow, mscale=yarn.mscale or 0.0, mscale_all_dim=yarn.mscale_all_dim or 0.0)
    return out


def _experts(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    out: dict[str, Any] = dict(
        num_moe_experts=moe.num_experts, moe_ffn_hidden_size=moe.intermediate_size, moe_router_topk=moe.top_k,
        moe_layer_freq=1 if len(moe.layers) == model.num_layers else [int(i in model.moe_layers) for i in range(model.num_layers)],
        moe_router_score_function=moe.score, moe_router_pre_softmax=moe.score == "softmax" and not moe.normalize,
        moe_router_enable_expert_bias=moe.correction_bias, moe_router_topk_scaling_factor=moe.scaling if moe.scaling != 1.0 else None,
        moe_shared_expert_intermediate_size=moe.shared_intermediate_size or None, moe_shared_expert_gate=moe.shared_gate, moe_grouped_gemm=True)
    if moe.groups:
        out.update(moe_router_num_groups=moe.groups, moe_router_group_topk=moe.top_groups)
    return out


def lm_arguments(model: ModelConfig, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> dict[str, Any]:
    """The arguments that Megatron-LM saves with a checkpoint, as far as they describe the model and how it is cut."""
    fields = fields_of(model)
    out = {_LM.get(name, name): value for name, value in fields.items() if name not in ("share_embeddings_and_output_weights", "rope_scaling")}
    out.update(
        untie_embeddings_and_output_weights=not model.tied, group_query_attention=model.num_kv_heads != model.num_heads,
        padded_vocab_size=model.padded_vocab_size(tp), max_position_embeddings=model.max_position_embeddings, use_rope_scaling="rope_scaling" in fields,
        add_position_embedding=False, use_rotary_position_embeddings=True, rotary_interleaved=False, squared_relu=False, apply_layernorm_1p=False,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp or tp,
        virtual_pipeline_model_parallel_size=None, ckpt_format="torch_dist", tokenizer_type="HuggingFaceTokenizer", iteration=0)
    return out


def from_lm(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments in the words of TransformerConfig; what is None is left out."""
    back = {lm: name for name, lm in _LM.items()}
    out = {back.get(name, name): value for name, value in arguments.items() if value is not None}
    out["share_embeddings_and_output_weights"] = not arguments.get("untie_embeddings_and_output_weights", False)
    if not arguments.get("group_query_attention"):
        out["num_query_groups"] = out.get("num_attention_heads")
    out["rope_scaling"] = bool(arguments.get("use_rope_scaling"))
    out.setdefault("seq_length", arguments.get("max_position_embeddings"))
    if "max_position_embeddings" in out:
        out["seq_length"] = out["max_position_embeddings"]
    return out


def check_types(stored: Mapping[str, Any], where: str) -> None:
    """Raise UserError that names a field that is no number where one is needed. `stored` is in the words of TransformerConfig."""
    for names, fits, words in ((_WHOLE, _is_whole, "a whole number of at least 0"), (_REAL, _is_real, "a number"),
                               (_PATTERNS, _is_pattern, "a whole number above 0, or a list of 0 and 1"), (("window_size",), _is_pair, "two whole numbers")):
        for name in names:
            value = stored.get(name)
            if value is not None and not fits(value):
                raise UserError(f"{where}: {name} is {value!r}; it must be {words}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_pattern(value: Any) -> bool:
    return all(x in (0, 1) for x in value) if isinstance(value, (list, tuple)) else _is_whole(value) and value > 0


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(x, int) for x in value)


def contradictions(model: ModelConfig, stored: Mapping[str, Any]) -> list[str]:
    """What config.json and the checkpoint's own description say differently. `stored` is in the words of TransformerConfig."""
    expected = fields_of(model)
    unused = {"ffn_hidden_size"} if model.moe is not None and len(model.moe.layers) == model.num_layers else set()
    if model.mla is not None:
        unused |= {"kv_channels", "num_query_groups"}
    if model.moe is not None and stored.get("moe_ffn_hidden_size") is None:
        unused.add("moe_ffn_hidden_size")  # Megatron then takes ffn_hidden_size
    out = []
    for name in _COMPARED:
        want, have = expected.get(name), stored.get(name)
        if name in unused or have is None or name not in expected and not have:
            continue
        if want != have and not (isinstance(want, float) and abs(float(have) - want) <= 1e-6 * abs(want)):
            out.append(f"{name} is {have} in the checkpoint and {want} in config.json")
    return out


def model_of(stored: Mapping[str, Any], where: str) -> ModelConfig:
    """The architecture from the checkpoint's own description, in the words of TransformerConfig. `where` is a plural.

    Raises UserError that names what no supported family has, what is missing, or what is no number where one is needed.
    """
    check_types(stored, where)
    try:
        config = _hf_config(stored, where)
    except KeyError as error:
        raise UserError(f"{where} do not say {error}; give the model's config.json with --hf-config DIR") from None
    return ModelConfig.from_hf(config, make_vocab_size_divisible_by=int(stored.get("make_vocab_size_divisible_by") or 128))


def _hf_config(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    _refuse(stored, where)
    heads, hidden = int(stored["num_attention_heads"]), int(stored["hidden_size"])
    vocabulary = stored.get("vocab_size")
    if vocabulary is None:
        vocabulary = stored["padded_vocab_size"]
        logger.warning("%s give the padded vocabulary only (%s rows); give --hf-config DIR for the model's own size", where, vocabulary)
    layers = int(stored["num_layers"])
    out: dict[str, Any] = dict(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=int(stored.get("num_query_groups") or heads),
        head_dim=int(stored.get("kv_channels") or hidden // heads), intermediate_size=int(stored["ffn_hidden_size"]), vocab_size=int(vocabulary),
        max_position_embeddings=int(stored.get("seq_length") or 2048), rms_norm_eps=float(stored.get("layernorm_epsilon", 1e-5)),
        initializer_range=float(stored.get("init_method_std") or 0.02), rope_theta=float(stored.get("rotary_base") or 10000.0),
        tie_word_embeddings=bool(stored.get("share_embeddings_and_output_weights", True)), dtype="bfloat16" if stored.get("bf16") else "float32")
    if stored.get("rope_scaling"):
        out["rope_scaling"] = dict(vars(_LLAMA3), rope_type="llama3", factor=float(stored.get("rope_scaling_factor") or _LLAMA3.factor))
    if stored.get("num_moe_experts"):
        return {**out, **_moe_family(stored, out, where)}
    if stored.get("multi_latent_attention"):
        raise UserError(f"{where}: latent attention without experts is no supported family")
    if stored.get("window_size"):
        return {**out, **_windowed(stored, where)}
    return {**out, "model_type": "qwen3" if stored.get("qk_layernorm") else "qwen2" if stored.get("add_qkv_bias") else "llama"}


def _windowed(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    skip = stored.get("window_attn_skip_freq")
    if stored.get("qk_layernorm") or stored.get("add_qkv_bias") or not (skip is None or isinstance(skip, list) and all(skip)):
        raise UserError(f"{where}: a sliding window in some layers, or beside biases or norms of queries, does not say which family this is; "
                        "give the model's config.json with --hf-config DIR")
    return {"model_type": "mistral", "sliding_window": int(stored["window_size"][0]) + 1}


def _refuse(stored: Mapping[str, Any], where: str) -> None:
    for name, allowed in (("normalization", "RMSNorm"), ("position_embedding_type", "rope"), ("gated_linear_unit", True)):
        value = stored.get(name, allowed)
        if value != allowed and not (name == "position_embedding_type" and value == "yarn" and stored.get("multi_latent_attention")):
            raise UserError(f"{where}: {name} is {value!r}; supported: {allowed!r}")
    for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma", "rotary_interleaved", "add_bias_linear"):
        if stored.get(name) and not (name == "add_bias_linear" and stored.get("softmax_type") == "learnable"):
            raise UserError(f"{where}: {name} is {stored[name]!r}, which no supported family has")
    if stored.get("softmax_type") == "learnable":
        raise UserError(f"{where} describe a gpt_oss model, whose scaling of rotary embeddings is not in them; give its config.json with --hf-config DIR")


def _moe_family(stored: Mapping[str, Any], out: Mapping[str, Any], where: str) -> dict[str, Any]:
    experts, layers = int(stored["num_moe_experts"]), int(out["num_hidden_layers"])
    freq = stored.get("moe_layer_freq", 1)
    pattern = [int(i % freq == 0) for i in range(layers)] if isinstance(freq, int) else [int(x) for x in freq]
    width = int(stored.get("moe_ffn_hidden_size") or out["intermediate_size"])
    shared = int(stored.get("moe_shared_expert_intermediate_size") or 0)
    common = dict(num_experts_per_tok=int(stored.get("moe_router_topk") or 2), moe_intermediate_size=width)
    dense = [i for i, moe in enumerate(pattern) if not moe]
    normalize = not stored.get("moe_router_pre_softmax")
    if stored.get("multi_latent_attention") or stored.get("moe_router_score_function") == "sigmoid":
        return _deepseek(stored, out, dict(common, n_routed_experts=experts, n_shared_experts=shared // width,
                                           first_k_dense_replace=_leading(dense, where)))
    if stored.get("moe_shared_expert_gate"):
        return dict(common, model_type="qwen2_moe", num_experts=experts, shared_expert_intermediate_size=shared, mlp_only_layers=dense,
                    decoder_sparse_step=1, qkv_bias=bool(stored.get("add_qkv_bias")), norm_topk_prob=normalize)
    if shared:
        raise UserError(f"{where}: shared experts without a gate beside a softmax router are no supported family; give --hf-config DIR")
    if stored.get("qk_layernorm"):
        return dict(common, model_type="qwen3_moe", num_experts=experts, mlp_only_layers=dense, decoder_sparse_step=1, norm_topk_prob=normalize)
    if dense:
        raise UserError(f"{where}: layers {dense} without experts in a mixtral model are not supported; give --hf-config DIR")
    return dict(num_experts_per_tok=common["num_experts_per_tok"], model_type="mixtral", num_local_experts=experts, intermediate_size=width)


def _deepseek(stored: Mapping[str, Any], out: Mapping[str, Any], moe: dict[str, Any]) -> dict[str, Any]:
    sigmoid = stored.get("moe_router_score_function") == "sigmoid"
    groups, top = int(stored.get("moe_router_num_groups") or 1), int(stored.get("moe_router_group_topk") or 1)
    moe.update(n_group=groups, topk_group=top, routed_scaling_factor=float(stored.get("moe_router_topk_scaling_factor") or 1.0),
               norm_topk_prob=sigmoid)
    if not stored.get("multi_latent_attention"):
        return {**moe, "model_type": "glm4_moe", "attention_bias": bool(stored.get("add_qkv_bias")), "use_qk_norm": bool(stored.get("qk_layernorm")),
                "partial_rotary_factor": float(stored.get("rotary_percent", 1.0))}
    moe.update(q_lora_rank=stored.get("q_lora_rank"), kv_lora_rank=int(stored["kv_lora_rank"]), qk_nope_head_dim=int(stored["qk_head_dim"]),
               qk_rope_head_dim=int(stored["qk_pos_emb_head_dim"]), v_head_dim=int(stored["v_head_dim"]),
               num_key_value_heads=out["num_attention_heads"], model_type="deepseek_v3" if sigmoid else "deepseek_v2")
    if not sigmoid:
        moe["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    if stored.get("rope_type", "yarn") == "yarn" and float(stored.get("rotary_scaling_factor") or 1.0) != 1.0:
        moe["rope_scaling"] = dict(rope_type="yarn", factor=float(stored["rotary_scaling_factor"]), **{
            name: stored[name] for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim") if stored.get(name)})
    return moe


def _leading(dense: list[int], where: str) -> int:
    if dense != list(range(len(dense))):
        raise UserError(f"{where}: layers {dense} have no experts; only leading ones may have none in this family")
    return len(dense)
