"""Multi-head latent attention: what Megatron's local spec gets wrong under tensor parallelism."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def whole_along_sequence(module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Forward hook of `linear_kv_down_proj`: [tokens, sequences, columns / tp] -> [tokens / tp, sequences, columns].

    Megatron's local spec cuts this projection over tp and gathers its columns, the rotary part of the keys among them, on
    every rank. The gather's backward only splits, but every rank's heads use the rotary part: its gradient is never summed, and all
    gradients below it are wrong (by half their size at times), without a word. In the form of this hook, that of Transformer
    Engine's uncut projection, MLASelfAttention gathers the rotary part along the sequence, whose backward sums.
    Needs sequence parallelism.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region

    columns, bias = output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(columns)), bias

