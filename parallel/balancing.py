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
    context-parallel ranks over which the row is cut, where it is; `sequences` and `experts` are then of this rank's tokens. `experts`
    [tokens, layers with experts, top_k] are choices to repeat (-1: none).
    """

    sequences: Tensor
    weights: Tensor
    group: Any = None
    experts: Tensor | None = None

    def of(self, columns: Tensor, group: Any) -> Tokens:
        """Of the tokens at `columns`, which this rank of a context-parallel group holds."""
        columns = columns.to(self.sequences.device)
        return Tokens(self.sequences[columns], self.weights, group, None if self.experts is None else self.experts[columns])

    def replay(self, layer: int, count: int, group: Any) -> Tensor | None:
        """Choices [count, top_k] that the `layer`-th layer with experts repeats, for its `count` tokens: all, or under sequence parallelism a rank's."""
        return None if self.experts is None else _part(self.experts[:, layer], count, group)


def _part(values: Tensor, count: int, group: Any) -> Tensor:
    return values if len(values) == count else values.chunk(group.size())[group.rank()]


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
    return Tokens(ids.to(device), torch.full((count,), weight, device=device), experts=micro_batch.experts)


class Load:
    """What one router counted since the last update: tokens per expert [experts], its auxiliary loss (without the coefficient), and choices
    that it repeated."""

    def __init__(self) -> None:
        self.counts: Tensor | float = 0.0
        self.loss: Tensor | float = 0.0
        self.replayed: Tensor | float = 0.0
        self.changed: Tensor | float = 0.0

    def compare(self, replay: Tensor, own: Tensor) -> None:
        """Count what the router repeated, and what of it was not its `own` choice; both [tokens, top_k]."""
        known = replay >= 0
        self.replayed = self.replayed + known.sum().double()
        self.changed = self.changed + (known & ~(replay[:, :, None] == own[:, None]).any(-1)).sum().double()

    def add(self, router: Any, tokens: Tokens, probabilities: Tensor, chosen: Tensor, options: MoEOptions) -> Tensor | None:
        """Count what `router` chose, both [tokens, experts]; returns the auxiliary loss of these tokens, with gradient, where there is one.

        The loss of a sequence s of T tokens is E / (k T) x sum over experts of count x mean probability (Switch Transformers,
        arXiv 2101.03961, eq. 4; per sequence: DeepSeek-V3, arXiv 2412.19437, eq. 17), 1 where the load is even. Counts are not
        differentiated, so that the loss is linear in probabilities and each rank adds its own tokens' part.
        """
        ids = _part(tokens.sequences, len(chosen), router.tp_group)
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


@dataclass(frozen=True)
class LayerLoad:
    """What a layer counted in an update, over all ranks: see `Load`."""

    counts: Tensor
    loss: float
    replayed: float
    changed: float


def settle(training: TrainingModel, options: MoEOptions) -> dict[int, LayerLoad]:
    """Collective, after an update: the load of each of this stage's layers, over all tokens of the update.

    With `bias` balancing every correction bias then moves by the update rate, up for experts with less than the mean load and down for
    those with more (arXiv 2408.15664, algorithm 1).
    """
    from megatron.core import parallel_state

    mine = [(layer, router) for layer, router in routers(training) if isinstance(router.load.counts, Tensor)]
    if not mine:
        return {}
    rows = torch.stack([_numbers(router.load) for _, router in mine])
    dist.all_reduce(rows, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    for row, (_, router) in zip(rows, mine, strict=True):
        if options.balancing == "bias":
            load = row[:-3]
            router.expert_bias.add_(options.bias_update_rate * torch.sign(load.mean() - load).float())
    return {layer: LayerLoad(row[:-3].cpu(), *row[-3:].tolist()) for row, (layer, _) in zip(rows, mine, strict=True)}


def _numbers(load: Load) -> Tensor:
    assert isinstance(load.counts, Tensor)
    others = [torch.as_tensor(x, dtype=torch.double, device=load.counts.device) for x in (load.loss, load.replayed, load.changed)]
    return torch.cat([load.counts, torch.stack(others)])
