"""The `torch` layer implementation: what Megatron-Core's local spec lacks without Transformer Engine or apex."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel.attention import SDPACoreAttention
from parallel.model_config import ModelConfig

LATENT_NORM_EPS = 1e-6


class RMSNorm(torch.nn.Module):
    """RMSNorm computed in fp32 (as transformers does), aware of sequence parallelism.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism; under it the weight's gradient must be summed over TP,
    which Megatron does for parameters marked `sequence_parallel`.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class LatentNorm(RMSNorm):
    """The norms inside latent attention, whose eps transformers fixes at 1e-6 whatever the model's is."""

    def __init__(self, config: Any, hidden_size: int, eps: float = LATENT_NORM_EPS, **unused: Any) -> None:
        super().__init__(config, hidden_size, LATENT_NORM_EPS)


def block_spec(model: ModelConfig, layers: Iterable[int], implementation: str) -> Any:
    """Megatron's spec of the decoder layers with global indices `layers`, each dense or with experts, and of the final norm.

    `torch` takes the local spec with the modules of this file and `parallel.attention`; `te` the Transformer Engine spec (needs
    Transformer Engine and a GPU).
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = _te_layer if implementation == "te" else _torch_layer
    dense, with_experts = layer(model, False), layer(model, True) if model.moe else None
    if implementation == "te":
        from megatron.core.extensions.transformer_engine import TENorm as norm
    else:
        norm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[with_experts if i in model.moe_layers else dense for i in layers], layer_norm=norm)


def _torch_layer(model: ModelConfig, experts: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    latent = model.mla is not None
    layer = get_gpt_layer_local_spec(model.moe.num_experts if experts and model.moe else None, normalization="RMSNorm",
                                     qk_layernorm=model.qk_norm or latent, multi_latent_attention=latent)
    s = layer.submodules
    s.input_layernorm = s.pre_mlp_layernorm = RMSNorm
    attention = s.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if latent:
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    s.sharded_state_dict_keys_map = _checkpoint_names(latent, experts)
    if experts:
        _route(s.mlp.submodules, model)
    return layer


def _checkpoint_names(latent: bool, experts: bool) -> dict[str, str]:
    """Norms are saved under the names of the Transformer Engine spec, so that a checkpoint does not depend on the layer implementation.

    Megatron's local spec has its own map, which renames the norm before experts too and none in latent attention.
    """
    names = {} if experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if latent:
        return {**names, "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
                "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_"}
    return {**names, "input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _te_layer(model: ModelConfig, experts: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    latent = model.mla is not None
    layer = get_gpt_layer_with_transformer_engine_spec(
        model.moe.num_experts if experts and model.moe else None, moe_grouped_gemm=experts, qk_layernorm=model.qk_norm or latent,
        multi_latent_attention=latent)
    if experts:
        _route(layer.submodules.mlp.submodules, model)
    return layer


def _route(moe: Any, model: ModelConfig) -> None:
    """The family's router, and experts that may have biases."""
    from parallel.megatron_modules import BiasedRowLinear, Router

    assert model.moe is not None
    moe.router = partial(Router, model.moe)
    if model.moe.expert_bias:
        moe.experts.submodules.linear_fc2 = BiasedRowLinear
