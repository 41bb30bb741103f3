"""Ragged sequences into right-padded micro-batches. Padding exists only here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.config import ParallelConfig


@dataclass(frozen=True)
class MicroBatch:
    """Token ids [sequences, tokens], padded on the right; `indices` say which sequences of the batch these are.

    An empty micro-batch (no indices) holds one padding row: it keeps pipeline and data-parallel ranks in step.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    indices: tuple[int, ...]

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)


def micro_batch_count(sequences: int, size: int, parallel: ParallelConfig) -> int:
    """Micro-batches needed for `sequences` (the largest number over data-parallel ranks): the same on every rank.

    Interleaved pipelines take a multiple of the number of stages.
    """
    count = max(1, -(-sequences // size))
    return -(-count // parallel.pp) * parallel.pp if parallel.chunks > 1 else count


def make_micro_batches(sequences: Sequence[Sequence[int]], indices: Sequence[int], size: int, count: int,
                       parallel: ParallelConfig, device: torch.device | str = "cpu", pad_id: int = 0) -> list[MicroBatch]:
    """Cut `indices` into micro-batches of `size` sequences in order, and add empty ones up to `count`."""
    groups = [tuple(indices[i:i + size]) for i in range(0, len(indices), size)]
    groups += [()] * (count - len(groups))
    multiple = parallel.tp if parallel.sequence_parallel else 1
    rows = [[sequences[i] for i in group] for group in groups]
    widths = [-(-max((len(r) for r in group), default=2) // multiple) * multiple for group in rows]
    heights = [max(len(group), 1) for group in rows]
    if parallel.chunks > 1:  # all stages must agree on one shape: see `transformer_config`
        longest = -(-max((len(s) for s in sequences), default=2) // multiple) * multiple
        widths, heights = [longest] * count, [size] * count
    return [MicroBatch(_pad(group, width, height, pad_id).to(device), tuple(len(r) for r in group), indices)
            for group, width, height, indices in zip(rows, widths, heights, groups, strict=True)]


def _pad(rows: list[Sequence[int]], width: int, height: int, pad_id: int) -> Tensor:
    tokens = torch.full((height, width), pad_id, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, :len(row)] = torch.tensor(row, dtype=torch.long)
    return tokens
