"""The `torch` layer implementation: what Megatron-Core's local spec lacks without Transformer Engine or apex."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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


class SDPACoreAttention(torch.nn.Module):
    """Causal core attention on `scaled_dot_product_attention`, in place of Megatron's unfused `DotProductAttention`.

    q [tokens, sequences, heads / tp, head_dim], k and v [tokens, sequences, kv_heads / tp, head_dim] -> [tokens, sequences,
    heads / tp * head_dim]. Sequences are padded on the right, so causality alone keeps padding out of real tokens.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
                 softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("this core attention does not support context parallelism")
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
                attn_mask_type: Any = None, attention_bias: Tensor | None = None, packed_seq_params: Any = None) -> Tensor:
        if packed_seq_params is not None or attention_bias is not None or attention_mask is not None:
            raise ValueError("this core attention takes right-padded causal batches: no mask, bias or packing")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def torch_block_spec(num_layers: int) -> Any:
    """Megatron's local layer spec with the two modules above, for `num_layers` layers and the final norm."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def te_layer_spec() -> Any:
    """Megatron's Transformer Engine layer spec (needs Transformer Engine and a GPU)."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec()
