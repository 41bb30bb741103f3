"""A head of one value in the place of a GPTModel's output layer. Imports Megatron-Core: load it only after `prepare_megatron`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueHead(torch.nn.Module):
    """hidden states [tokens, sequences, hidden] -> values [tokens, sequences, 1], fp32. `weight` [1, hidden] is the same on all ranks.

    Under sequence parallelism each tensor-parallel rank scores its own part of the tokens, so that its gradient of the weight is a part of
    a sum: the attribute `sequence_parallel` lets Megatron's finalisation add the parts up, as it does for norms. The values are then
    gathered, and each rank takes back the gradient of its own. Without, all ranks compute the same and hold whole gradients.
    """

    def __init__(self, hidden_size: int, like: Tensor, sequence_parallel: bool, tp_group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=like.dtype, device=like.device))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel, self.tp_group = sequence_parallel, tp_group

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
        """The signature of Megatron's output layer."""
        values = torch.nn.functional.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self.tp_group)
        return values, None


def put_value_head(module: Any) -> None:
    """Replace the output layer of a GPTModel with an untied head (whose vocabulary matrix is freed) by a value head of zeros."""
    layer = module.output_layer
    module.output_layer = ValueHead(module.config.hidden_size, layer.weight, module.config.sequence_parallel, layer.tp_group)
