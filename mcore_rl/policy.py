"""A role that holds a network: the actor and the critic (trained) or the reference (frozen)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.exchange import Exchange
from parallel.errors import UserError
from parallel.micro_batch import MicroBatch, make_micro_batches
from parallel.packing import SHARED_NEEDS_TORCH, Batching, plan_micro_batches
from parallel.training import TrainingModel

Masks = Sequence[Sequence[bool]] | None  # by sequence and token: which log-probs are wanted; None: all
Choices = Sequence[Tensor] | None  # by sequence: experts that routers repeat, see `make_micro_batches`; None: they choose themselves
# (sample index, log-probs [tokens], entropy [tokens]), of the critic (sample index, values [tokens]) -> (loss, numbers to report)
SampleLoss = Callable[..., tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Policy:
    """Runs samples through a TrainingModel and brings results back to every rank, by sample."""

    training: TrainingModel
    exchange: Exchange
    world_size: int
    batching: Batching = Batching()

    def __post_init__(self) -> None:
        if self.batching.packing == "shared_prompt" and self.training.implementation == "te":
            raise UserError(SHARED_NEEDS_TORCH)

    def _micro_batches(self, sequences: Sequence[Sequence[int]], chosen: Sequence[int], size: int, masks: Masks, experts: Choices = None) -> list[MicroBatch]:
        """This data-parallel rank's share of the samples `chosen`, in micro-batches; their number is the same on all ranks."""
        t = self.training
        groups = plan_micro_batches(sequences, chosen, masks, size, self.batching, t.model, t.parallel, t.parallel.dp(self.world_size))
        return make_micro_batches(sequences, groups[t.at.dp], t.parallel, self.batching.packing, masks, t.device.torch, experts=experts)

    def log_probs(self, sequences: Sequence[Sequence[int]], size: int, temperature: float, masks: Masks = None,
                  experts: Choices = None) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs and entropies [tokens] of every sequence, on every rank: 0 where `masks` is false and at entry 0, which has no context."""
        merged = self._predict(sequences, size, temperature, masks, "log-probs", experts)
        return [a for a, _ in merged], [b for _, b in merged]

    def values(self, sequences: Sequence[Sequence[int]], size: int, masks: Masks = None) -> list[Tensor]:
        """A value model's values [tokens] of every sequence, on every rank: entry t is that of what comes before token t; 0 as in `log_probs`."""
        return [value for value, in self._predict(sequences, size, 1.0, masks, "values")]

    def _predict(self, sequences: Sequence[Sequence[int]], size: int, temperature: float, masks: Masks, what: str,
                 experts: Choices = None) -> list[tuple[Tensor, ...]]:
        """Every sequence's predictions, on every rank: whichever ranks of this role computed them, they are found by sample."""

        def collect(micro_batch: MicroBatch, *predictions: Tensor) -> tuple[Tensor, dict[str, Any]]:
            rows = zip(micro_batch.indices, *map(micro_batch.split, predictions), strict=True)
            return predictions[0].sum(), {i: tuple(map(_full, parts)) for i, *parts in rows}

        batches = self._micro_batches(sequences, range(len(sequences)), size, masks, experts)
        outputs = self.training.forward_backward(batches, collect, temperature, forward_only=True)
        mine = {i: tuple(p.cpu() for p in parts) for output in outputs for i, parts in output.items()} if self.training.is_output_rank else {}
        return self.exchange.merge(mine, len(sequences), what)

    def update(self, sequences: Sequence[Sequence[int]], chosen: Sequence[int], size: int, temperature: float,
               loss: SampleLoss, masks: Masks = None, experts: Choices = None) -> tuple[list[Tensor], float, float]:
        """One optimizer step on the samples `chosen`. Returns (reported values per chosen sample, gradient norm, learning rate).

        `loss` weighs a sample's tokens by global counts, so the sum over samples is the loss whatever the split. It gets predictions of 0
        where `masks` is false.
        """

        def total(micro_batch: MicroBatch, *predictions: Tensor) -> tuple[Tensor, dict[str, Any]]:
            value, reports = predictions[0].sum() * 0.0, {}
            for i, *parts in zip(micro_batch.indices, *map(micro_batch.split, predictions), strict=True):
                one, reports[i] = loss(i, *map(_full, parts))
                value = value + one
            return value, reports

        batches = self._micro_batches(sequences, chosen, size, masks, experts)
        outputs = self.training.forward_backward(batches, total, temperature, update_sequences=len(chosen))
        position = {i: k for k, i in enumerate(chosen)}
        mine = {position[i]: v.cpu() for output in outputs for i, v in output.items()} if self.training.is_output_rank else {}
        reports = self.exchange.merge(mine, len(chosen), "update reports")
        broken = [chosen[k] for k, report in enumerate(reports) if not torch.isfinite(report).all()]
        if broken:
            raise FloatingPointError(f"the loss of samples {broken[:8]} is not finite; no weight was changed")
        grad_norm, lr = self.training.optimizer_step()
        return reports, grad_norm, lr


    def load(self) -> dict[str, float]:
        """How the last update's tokens spread over the experts, as `moe/*` metrics; a collective. {} of a model without experts.

        `moe/max_load_share`: the largest share of an expert in a layer, times the number of experts (1 is even). `moe/load_entropy`: the
        smallest entropy of a layer's shares, divided by that of an even load. `moe/aux_loss`: mean over layers, without its coefficient.
        `moe/replay_changed`: the share of the repeated choices that the routers would not have made.
        """
        layers = {layer: found for part in self.exchange.gather(self.training.load) for layer, found in part.items()}
        shares = [layer.counts / layer.counts.sum() for layer in layers.values() if layer.counts.sum() > 0]
        if not shares:
            return {}
        out = {"moe/max_load_share": max(float(s.max()) * len(s) for s in shares),
               "moe/load_entropy": min(float(torch.special.entr(s).sum()) / math.log(len(s)) for s in shares)}
        if self.training.options.moe.loss:
            out["moe/aux_loss"] = sum(layer.loss for layer in layers.values()) / len(layers)
        if replayed := sum(layer.replayed for layer in layers.values()):
            out["moe/replay_changed"] = sum(layer.changed for layer in layers.values()) / replayed
        return out


def _full(row: Tensor) -> Tensor:
    """Predictions [tokens - 1] aligned with the tokens they are about: [tokens], entry 0 is 0."""
    return torch.cat([row.new_zeros(1), row])
