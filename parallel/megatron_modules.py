"""Megatron-Core's classes with one method of each changed. Imports Megatron-Core: load it only after `prepare_megatron`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from parallel.model_config import MoE
from parallel.routing import choose_experts


class Router(TopKRouter):
    """Megatron's router with `choose_experts`. Load-balancing losses are not applied.

    The correction bias is Megatron's fp32 buffer `expert_bias`: no gradient and no weight decay reach it, and with an update
    rate of 0 (see `transformer_config`) training leaves it as it was loaded.
    """

    def __init__(self, moe: MoE, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.moe = moe

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [tokens, sequences, experts] -> weights (0 where not chosen) and choice, both [tokens * sequences, experts]."""
        logits = logits.reshape(-1, self.moe.num_experts)
        weights, indices = choose_experts(logits, self.moe, self.expert_bias)
        chosen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter(1, indices, True)
        return torch.zeros(logits.shape, dtype=weights.dtype, device=logits.device).scatter(1, indices, weights), chosen


class BiasedRowLinear(RowParallelLinear):
    """The down-projection of experts with biases, at etp 1.

    Megatron's MLP adds an expert's bias in place, which autograd refuses on what RowParallelLinear returns, its input aliased: here
    the output is a tensor of its own. And RowParallelLinear marks its bias as replicated over tp under sequence parallelism, so
    that the gradients of different experts, which tp ranks hold at etp 1, would be summed: here it is not marked.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


class LatentRotary(RotaryEmbedding):
    """Answers latent attention as Megatron's YaRN embedding does, (angles, scale), with given frequencies and scale."""

    def __init__(self, frequencies: Tensor, scale: float, cp_group: Any) -> None:
        super().__init__(2 * len(frequencies), 1.0, cp_group=cp_group)
        self.inv_freq, self.scale = frequencies.to(self.inv_freq.device), scale

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> tuple[Tensor, float]:
        return super().forward(max_seq_len, offset, packed_seq, cp_group), self.scale
