"""Megatron-Core models from a HF architecture: configuration, layer specs, one GPTModel per model chunk."""

from __future__ import annotations

import logging
from typing import Any

import torch

from parallel.config import ParallelConfig
from parallel.device import Device
from parallel.errors import UserError
from parallel.layers import te_layer_spec, torch_block_spec
from parallel.model_config import ModelConfig
from parallel.rope import inverse_frequencies

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """Raises UserError for a name that is not a supported training dtype."""
    if name not in DTYPES:
        raise UserError(f"model.dtype is {name!r}; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_layer_implementation(name: str, device: Device) -> str:
    """`auto` takes Transformer Engine (`te`) where it imports and a GPU is there, else `torch`. The choice is logged."""
    if name not in ("auto", "torch", "te"):
        raise UserError(f"layer_implementation is {name!r}; allowed: auto, torch, te")
    if name == "torch":
        return name
    reason = "no CUDA device" if device.type == "cpu" else None
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


def transformer_config(model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype, implementation: str) -> Any:
    """Megatron's TransformerConfig. Fusions that need Transformer Engine or apex are off in the `torch` implementation."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fused = implementation == "te"
    return TransformerConfig(
        num_layers=model.num_layers, hidden_size=model.hidden_size, ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_heads, num_query_groups=model.num_kv_heads, kv_channels=model.head_dim,
        normalization="RMSNorm", layernorm_epsilon=model.rms_norm_eps, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, add_qkv_bias=model.qkv_bias,
        init_method_std=model.init_std, hidden_dropout=0.0, attention_dropout=0.0,
        # perform_initialization stays on: without it Megatron does not mark tensor-parallel parameters, and the gradient
        # norm silently loses those of all ranks but the first
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tp, pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp, context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel, variable_seq_lengths=parallel.pp > 1 and parallel.chunks == 1,
        moe_token_dispatcher_type="alltoall",
        # with two stages the batched send/receive of interleaved schedules pairs the wrong messages, and so does its exchange
        # of shapes: micro-batches are then padded to one shape instead
        batch_p2p_comm=parallel.chunks == 1, calculate_per_token_loss=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=fused, bias_activation_fusion=fused,
        bias_dropout_fusion=fused, apply_rope_fusion=fused, persist_layer_norm=fused)


def build_modules(model: ModelConfig, parallel: ParallelConfig, config: Any, implementation: str) -> list[Any]:
    """One GPTModel per model chunk of this rank, inside the role's entered groups, with random weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    modules = []
    for chunk in range(parallel.chunks):
        first = pp_rank == 0 and chunk == 0
        last = pp_rank == parallel.pp - 1 and chunk == parallel.chunks - 1
        spec = te_layer_spec() if implementation == "te" else torch_block_spec(len(parallel.layers(model, pp_rank, chunk)))
        module = GPTModel(
            config, spec, vocab_size=model.padded_vocab_size(parallel.tp), max_sequence_length=model.max_position_embeddings,
            pre_process=first, post_process=last, share_embeddings_and_output_weights=model.tied,
            position_embedding_type="rope", rotary_base=model.rope_theta, vp_stage=chunk if parallel.vpp else None)
        # Megatron's own llama3 scaling fixes all but the factor: the frequencies are set here for any of them
        module.rotary_pos_emb.inv_freq = inverse_frequencies(model).to(module.rotary_pos_emb.inv_freq.device)
        modules.append(module)
    return modules


def named_tensors(modules: list[Any]) -> dict[str, torch.Tensor]:
    """Parameters by layout name: the GPTModel name, below `chunk{i}.` where a stage holds several chunks."""
    return {(f"chunk{i}." if len(modules) > 1 else "") + name: parameter.data
            for i, module in enumerate(modules) for name, parameter in module.named_parameters()}
