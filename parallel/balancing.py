"""The load of experts: counted without padding, kept even by a loss or by moving correction biases.

Megatron's own auxiliary losses are divided by counts of micro-batches and tokens that our losses, which carry global weights, do not
know; here they carry global weights too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.micro_batch import MicroBatch
from parallel.options import MoEOptions

if TYPE_CHECKING:
    from parallel.training import TrainingModel


@dataclass(eq=False)
class Tokens:
    """Which sequence each token of a packed row belongs to, [tokens] (-1: padding), for the routers that see them.

    `weights` [sequences] are the sequences' shares of the update's loss: they sum to 1 over all micro-batches and ranks. `group`: the
    context-parallel ranks over which the row is cut, where it is; `sequences` are then of this rank's tokens.
    """

    sequences: Tensor
    weights: Tensor
    group: Any = None

    def of(self, columns: Tensor, group: Any) -> Tokens:
        """Of the tokens at `columns`, which this rank of a context-parallel group holds."""
        return Tokens(self.sequences[columns.to(self.sequences.device)], self.weights, group)


def tokens_of(micro_batch: MicroBatch, options: MoEOptions, update_sequences: int, micro_batches: int) -> Tokens | None:
    """For a packed row; None for padded rows. `update_sequences`: of all ranks; `micro_batches`: of all data-parallel ranks."""
    if micro_batch.segments is None:
        return None
    ids = torch.full((micro_batch.tokens.shape[1],), -1, dtype=torch.long)
    for i, segment in enumerate(micro_batch.segments):
        ids[segment.start:segment.start + segment.length - segment.padding] = 0 if options.balancing == "aux_loss" else i
    count = min(len(micro_batch.segments), 1) if options.balancing == "aux_loss" else len(micro_batch.segments)
    weight = 1.0 / max(micro_batches if options.balancing == "aux_loss" else update_sequences, 1)
    device = micro_batch.tokens.device
    return Tokens(ids.to(device), torch.full((count,), weight, device=device))


class Load:
    """What one router counted since the last update: tokens per expert [experts], and its auxiliary loss (without the coefficient)."""

    def __init__(self) -> None:
        self.counts: Tensor | float = 0.0
        self.loss: Tensor | float = 0.0

    def add(self, router: Any, tokens: Tokens, probabilities: Tensor, chosen: Tensor, options: MoEOptions) -> Tensor | None:
        """Count what `router` chose, both [tokens, experts]; returns the auxiliary loss of these tokens, with gradient, where there is one.

        The loss of a sequence s of T tokens is E / (k T) x sum over experts of count x mean probability (Switch Transformers,
        arXiv 2101.03961, eq. 4; per sequence: DeepSeek-V3, arXiv 2412.19437, eq. 17), 1 where the load is even. Counts are not
        differentiated, so that the loss is linear in probabilities and each rank adds its own tokens' part.
        """
        ids = tokens.sequences
        if len(ids) != len(chosen):  # sequence parallelism: this rank's part of the row
            ids = ids.chunk(router.tp_group.size())[router.tp_group.rank()]
        real = ids >= 0
        self.counts = self.counts + (chosen & real[:, None]).sum(0).double()
        if not options.loss or not len(tokens.weights):
            return None
        by_sequence = torch.zeros(len(tokens.weights), chosen.shape[1], device=chosen.device)
        by_sequence.index_add_(0, ids[real], chosen[real].float())
        if len(ids) != len(tokens.sequences):
            dist.all_reduce(by_sequence, group=router.tp_group)
        if tokens.group is not None:
            dist.all_reduce(by_sequence, group=tokens.group)
        k = router.moe.top_k
        lengths = by_sequence.sum(1, keepdim=True) / k
        slope = tokens.weights[:, None] * chosen.shape[1] / k * by_sequence / lengths.clamp_min(1).square()
        loss = (probabilities[real] * slope[ids[real]]).sum()
        self.loss = self.loss + loss.detach().double()
        return loss


def routers(training: TrainingModel) -> Iterator[tuple[int, Any]]:
    """(global layer, router) of this rank's layers with experts."""
    for module in training.modules:
        for layer in module.decoder.layers:
            if hasattr(layer.mlp, "router"):
                yield layer.layer_number - 1, layer.mlp.router


def forget(training: TrainingModel) -> None:
    """Start counting anew, before an update's first forward pass."""
    for _, router in routers(training):
        router.load = Load()


def settle(training: TrainingModel, options: MoEOptions) -> dict[int, tuple[Tensor, float]]:
    """Collective, after an update: (tokens per expert [experts], auxiliary loss) of each of this stage's layers, over all tokens of the update.

    With `bias` balancing every correction bias then moves by the update rate, up for experts with less than the mean load and down for
    those with more (arXiv 2408.15664, algorithm 1).
    """
    from megatron.core import parallel_state

    mine = [(layer, router) for layer, router in routers(training) if isinstance(router.load.counts, Tensor)]
    if not mine:
        return {}
    both = torch.stack([torch.cat([router.load.counts, torch.as_tensor(router.load.loss, device=router.load.counts.device).double().reshape(1)])
                        for _, router in mine])
    dist.all_reduce(both, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    for row, (_, router) in zip(both, mine, strict=True):
        if options.balancing == "bias":
            load = row[:-1]
            router.expert_bias.add_(options.bias_update_rate * torch.sign(load.mean() - load).float())
    return {layer: (row[:-1].cpu(), float(row[-1])) for row, (layer, _) in zip(both, mine, strict=True)}
