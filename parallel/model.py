"""Megatron-Core models from a HF architecture: configuration, layer specs, one GPTModel per model chunk."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from parallel.config import ParallelConfig
from parallel.device import Device
from parallel.errors import UserError
from parallel.fp8_linear import round_linears
from parallel.fp8_recipe import te_options
from parallel.latent_attention import whole_along_sequence
from parallel.layers import LATENT_NORM_EPS, block_spec
from parallel.model_config import ModelConfig, Yarn
from parallel.options import TrainingOptions
from parallel.rope import rotary_scale, set_frequencies

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """Raises UserError for a name that is not a supported training dtype."""
    if name not in DTYPES:
        raise UserError(f"model.dtype is {name!r}; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_layer_implementation(name: str, device: Device, model: ModelConfig | None = None) -> str:
    """`auto` takes Transformer Engine (`te`) where it imports, a GPU is there and it knows the model, else `torch`. The choice is logged."""
    if name not in ("auto", "torch", "te"):
        raise UserError(f"layer_implementation is {name!r}; allowed: auto, torch, te")
    if name == "torch":
        return name
    reason = "no CUDA device" if device.type == "cpu" else _beyond_transformer_engine(model) if model else None
    if reason is None:
        try:
            import transformer_engine.pytorch  # type: ignore[import-not-found]  # noqa: F401
        except ImportError as error:
            reason = f"Transformer Engine does not import ({error})"
    if reason is None:
        return "te"
    if name == "te":
        raise UserError(f"layer_implementation is te, but {reason}; use torch or auto")
    logger.debug("layer implementation: torch (%s)", reason)
    return "torch"


def _beyond_transformer_engine(model: ModelConfig) -> str | None:
    if model.sinks or (model.moe and model.moe.expert_bias):
        return f"the sinks and expert biases of {model.family} are built in torch only"
    if model.mla and model.rms_norm_eps != LATENT_NORM_EPS:
        return f"the norms of latent attention have eps {LATENT_NORM_EPS} and the model's others {model.rms_norm_eps}, which its fused layers cannot"
    return None


def transformer_config(model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype, implementation: str,
                       options: TrainingOptions = TrainingOptions()) -> Any:
    """Megatron's TransformerConfig. Fusions that need Transformer Engine or apex are off in the `torch` implementation."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fused = implementation == "te"
    if fused and parallel.cp > 1 and model.windowed_layers:
        raise UserError(f"cp={parallel.cp}: sliding windows ({model.family}) over context-parallel ranks are built in torch only, Transformer Engine's ring has "
                        "none; set layer_implementation: torch, or cp=1")
    plain_rotary = model.mla is None and rotary_scale(model) == 1.0
    config = (MLATransformerConfig if model.mla else TransformerConfig)(
        num_layers=model.num_layers, hidden_size=model.hidden_size, ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_heads, num_query_groups=model.num_kv_heads, kv_channels=model.head_dim,
        normalization="RMSNorm", layernorm_epsilon=model.rms_norm_eps, gated_linear_unit=True,
        add_bias_linear=model.o_bias, add_qkv_bias=model.qkv_bias, qk_layernorm=model.qk_norm or model.mla is not None,
        init_method_std=model.init_std, hidden_dropout=0.0, attention_dropout=0.0,
        # perform_initialization stays on: without it Megatron does not mark tensor-parallel parameters, and the gradient
        # norm silently loses those of all ranks but the first
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tp, context_parallel_size=parallel.cp, sequence_parallel=parallel.sequence_parallel,
        calculate_per_token_loss=True, moe_token_dispatcher_type="alltoall",  # asked for in dense models too: see variable_seq_lengths
        gradient_accumulation_fusion=False, masked_softmax_fusion=fused, bias_activation_fusion=fused,
        bias_dropout_fusion=fused, apply_rope_fusion=fused and plain_rotary, persist_layer_norm=fused,
        **te_options(options.fp8 if fused else None), **_activation(model), **_attention(model), **_experts(model, parallel, fused),
        **_pipeline(parallel), **options.megatron())
    if model.mla is None and rotary_scale(model) != 1.0:
        # Megatron's attention scales by 0.1 x mscale x ln(factor) + 1 where the configuration has these attributes
        config.yarn_rotary_scaling_factor, config.yarn_mscale, config.yarn_mscale_all_dim = math.e, 10 * (rotary_scale(model) - 1.0), 0.0
    return config


def _activation(model: ModelConfig) -> dict[str, Any]:
    if model.swiglu_limit is None:
        return dict(activation_func=torch.nn.functional.silu)
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    # gpt_oss: gate * sigmoid(1.702 gate) * (up + 1), gate and up clamped
    return dict(activation_func=quick_gelu, activation_func_clamp_value=model.swiglu_limit, glu_linear_offset=1.0)


def _attention(model: ModelConfig) -> dict[str, Any]:
    out: dict[str, Any] = dict(softmax_type="learnable") if model.sinks else {}
    if model.sliding_window is not None and model.windowed_layers:
        # a window of w keys holds the position itself and w - 1 before it
        out.update(window_size=(model.sliding_window - 1, 0),
                   window_attn_skip_freq=[int(i in model.windowed_layers) for i in range(model.num_layers)])
    if model.mla is not None:
        # the frequencies are set by `set_frequencies`; of these numbers only the softmax scale is made
        yarn = model.rope_scaling if isinstance(model.rope_scaling, Yarn) else Yarn(1.0, model.max_position_embeddings)
        out.update(q_lora_rank=model.mla.q_lora_rank, kv_lora_rank=model.mla.kv_lora_rank, qk_head_dim=model.mla.qk_nope_head_dim,
                   qk_pos_emb_head_dim=model.mla.qk_rope_head_dim, v_head_dim=model.mla.v_head_dim, rope_type="yarn",
                   rotary_base=model.rope_theta, rotary_scaling_factor=yarn.factor, mscale_all_dim=yarn.mscale_all_dim or 0.0,
                   original_max_position_embeddings=yarn.original_max_position_embeddings)
    return out


def _experts(model: ModelConfig, parallel: ParallelConfig, grouped: bool) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    return dict(
        num_moe_experts=moe.num_experts, moe_ffn_hidden_size=moe.intermediate_size, moe_router_topk=moe.top_k,
        # a list, even of ones only, makes Megatron save every layer under keys of its own
        moe_layer_freq=1 if len(model.moe_layers) == model.num_layers else [int(i in model.moe_layers) for i in range(model.num_layers)],
        moe_shared_expert_intermediate_size=moe.shared_intermediate_size or None, moe_shared_expert_gate=moe.shared_gate,
        expert_model_parallel_size=parallel.ep, expert_tensor_parallel_size=parallel.expert_tp,
        # how experts are chosen, weighed and kept in balance is `Router`'s business; these say what Megatron's checks and buffers ask for
        moe_router_score_function=moe.score, moe_router_pre_softmax=moe.score == "softmax", moe_router_dtype="fp32",
        moe_router_enable_expert_bias=moe.correction_bias, moe_router_bias_update_rate=0.0,
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_grouped_gemm=grouped, moe_permute_fusion=False)


def _pipeline(parallel: ParallelConfig) -> dict[str, Any]:
    return dict(
        pipeline_model_parallel_size=parallel.pp, virtual_pipeline_model_parallel_size=parallel.vpp,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers, num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        pipeline_model_parallel_layout=parallel.pipeline_layout, variable_seq_lengths=parallel.pp > 1 and parallel.chunks == 1,
        # with two stages the batched send/receive of interleaved schedules pairs the wrong messages, and so does its exchange
        # of shapes: micro-batches are then padded to one shape instead
        batch_p2p_comm=parallel.chunks == 1)


def build_modules(model: ModelConfig, parallel: ParallelConfig, config: Any, implementation: str, fp8: str | None = None) -> list[Any]:
    """One GPTModel per model chunk of this rank, inside the role's entered groups, with random weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from parallel.value_head import put_value_head

    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    modules = []
    for chunk in range(parallel.chunks):
        first = pp_rank == 0 and chunk == 0
        last = pp_rank == parallel.pp - 1 and chunk == parallel.chunks - 1
        module = GPTModel(
            config, block_spec(model, parallel.layers(model, pp_rank, chunk), implementation),
            vocab_size=model.padded_vocab_size(parallel.tp), max_sequence_length=model.max_position_embeddings,
            pre_process=first, post_process=last, share_embeddings_and_output_weights=model.tied, position_embedding_type="rope",
            rotary_percent=model.rotary_fraction, rotary_base=model.rope_theta, vp_stage=chunk if parallel.vpp else None)
        set_frequencies(module, model)
        if last and model.head == "value":
            put_value_head(module)
        if model.mla is not None and parallel.tp > 1 and implementation == "torch":
            for layer in module.decoder.layers:
                layer.self_attention.linear_kv_down_proj.register_forward_hook(whole_along_sequence)
        if fp8 is not None and implementation == "torch":
            round_linears(module, model)
        if parallel.expert_tp != parallel.tp:
            _reduce_as_experts(module)
        modules.append(module)
    return modules


def _reduce_as_experts(module: Any) -> None:
    """Let the gradients of experts be summed over the ranks that hold the same experts.

    Megatron does so with ep > 1 only. With ep 1 and etp other than tp it sums them over the data-parallel ranks of the dense
    parameters, and the gradients of the tokens on other tensor-parallel ranks are silently lost.
    """
    for name, parameter in module.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def named_tensors(modules: list[Any]) -> dict[str, torch.Tensor]:
    """Weights by layout name: the GPTModel name, below `chunk{i}.` where a stage holds several chunks.

    Parameters, and the routers' fp32 correction biases, which Megatron keeps as buffers.
    """
    out: dict[str, torch.Tensor] = {}
    for i, module in enumerate(modules):
        prefix = f"chunk{i}." if len(modules) > 1 else ""
        out.update((prefix + name, parameter.data) for name, parameter in module.named_parameters())
        out.update((prefix + name, buffer) for name, buffer in module.named_buffers() if name.endswith("router.expert_bias"))
    return out
