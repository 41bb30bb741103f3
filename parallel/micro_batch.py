"""Ragged sequences into the rows that a model computes: packed one after the other, with shared prompts, or padded on the right.

Padding exists only here, and so does the choice of what is computed at all: a token that nothing is predicted from is left out of
packed rows, and predictions that nobody wants are made in no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.packing import Needed, Packing, needed


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of a packed row: causal among themselves, and after those of `prefix` (start, length).

    Under context parallelism `length` counts `padding` tokens at the end, up to a multiple of 2 cp; a prefix's does not.
    """

    start: int
    length: int
    prefix: tuple[int, int] = (0, 0)
    padding: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Token ids and positions [rows, tokens]; `indices` and `lengths` say which sequences of the batch these are and how long.

    Predictions are made from the positions `rows` (of the flattened tokens) about the token ids `targets`, both [predictions].
    `spread` [sum of (length - 1)] says which of them is about which token, all sequences one after the other, each from its second
    token on; `predictions` stands for none. `segments` of a packed row are in its order, without gaps; None: rows are padded.
    An empty micro-batch (no indices) holds padding only: it keeps pipeline and data-parallel ranks in step. `experts` [tokens, layers with
    experts, top_k] are choices that the routers repeat, -1 where they choose themselves; only of packed rows.
    """

    tokens: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    indices: tuple[int, ...]
    rows: Tensor
    targets: Tensor
    spread: Tensor
    segments: tuple[Segment, ...] | None = None
    experts: Tensor | None = None

    def per_token(self, predictions: Tensor) -> Tensor:
        """Values [predictions] as [sum of (length - 1)], 0 where none was made."""
        return torch.cat([predictions, predictions.new_zeros(1)])[self.spread]

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Values [sum of (length - 1)] by sequence."""
        return values.split([max(n - 1, 0) for n in self.lengths])


def make_micro_batches(sequences: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], parallel: ParallelConfig, packing: Packing = "packed",
                       masks: Sequence[Sequence[bool]] | None = None, device: torch.device | str = "cpu", pad_id: int = 0,
                       experts: Sequence[Tensor] | None = None) -> list[MicroBatch]:
    """One micro-batch per entry of `groups`, which holds indices of `sequences`. Log-probs are made where `masks` is true (None: everywhere).

    `experts`: of every sequence the choices for its first tokens, [known tokens, layers with experts, top_k].
    """
    multiple = parallel.row_multiple
    drafts = [_Draft(sequences, masks, tuple(group), packing, parallel.sequence_multiple, experts) for group in groups]
    widths = [-(-max(d.width, 2) // multiple) * multiple for d in drafts]
    heights = [max(d.height, 1) for d in drafts]
    if parallel.chunks > 1:  # all stages must agree on one shape: see `transformer_config`
        widths, heights = [max(widths)] * len(drafts), [max(heights)] * len(drafts)
    return [d.fill(width, height, pad_id, device) for d, width, height in zip(drafts, widths, heights, strict=True)]


class _Draft:
    """A micro-batch on its way: pieces (row, column, first position, token ids), predictions (row, column, token id) and their sequences."""

    def __init__(self, sequences: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] | None, indices: tuple[int, ...],
                 packing: Packing, multiple: int = 1, experts: Sequence[Tensor] | None = None) -> None:
        self.multiple = multiple  # of a packed piece's length
        self.indices, self.lengths = indices, tuple(len(sequences[i]) for i in indices)
        self.pieces: list[tuple[int, int, int, Sequence[int]]] = []
        self.segments: list[Segment] = []
        self.experts: list[tuple[int, Tensor]] = []  # column, choices from there on
        self.width = self.height = 0
        self.at: list[tuple[int, int]] = []
        self.targets: list[int] = []
        self.spread: list[int] = []
        self.packed = packing != "padded"
        prompts: dict[tuple[int, ...], int] = {}
        for i in indices:
            ids, mask, chosen = sequences[i], None if masks is None else masks[i], None if experts is None else experts[i]
            part = needed(len(ids), mask)
            if not self.packed:
                place = self._add_row(ids)
            elif packing == "shared_prompt" and masks is not None:
                place = self._add_after_prompt(ids, part, prompts, chosen)
            else:
                place = self._add(ids[:part.inputs], 0, chosen)
            for t in range(1, len(ids)):
                wanted = mask is None or mask[t]
                self.spread.append(len(self.targets) if wanted else -1)
                if wanted:
                    self.at.append(place(t - 1))
                    self.targets.append(ids[t])

    def _add_row(self, ids: Sequence[int]) -> Callable[[int], tuple[int, int]]:
        row = self.height
        self.height += 1
        self.width = max(self.width, len(ids))
        self.pieces.append((row, 0, 0, ids))
        return lambda t: (row, t)

    def _add(self, ids: Sequence[int], position: int, chosen: Tensor | None, prefix: tuple[int, int] = (0, 0)) -> Callable[[int], tuple[int, int]]:
        start, length = self.width, -(-len(ids) // self.multiple) * self.multiple
        self.height, self.width = 1, start + length
        if len(ids):
            self.pieces.append((0, start, position, ids))
            self.segments.append(Segment(start, length, prefix, length - len(ids)))
            if chosen is not None:
                self.experts.append((start, chosen[position:position + len(ids)]))
        return lambda t: (0, start + t - position)

    def _add_after_prompt(self, ids: Sequence[int], part: Needed, prompts: dict[tuple[int, ...], int],
                          chosen: Tensor | None) -> Callable[[int], tuple[int, int]]:
        p, key = part.prompt, tuple(ids[:part.prompt])
        if key not in prompts:
            prompts[key] = self.width
            self._add(key, 0, chosen)
        start = prompts[key]
        own = self._add(ids[p:part.inputs], p, chosen, (start, p))
        return lambda t: (0, start + t) if t < p else own(t)

    def fill(self, width: int, height: int, pad_id: int, device: torch.device | str) -> MicroBatch:
        tokens = torch.full((height, width), pad_id, dtype=torch.long)
        positions = torch.arange(width).repeat(height, 1)
        for row, column, position, ids in self.pieces:
            tokens[row, column:column + len(ids)] = torch.tensor(ids, dtype=torch.long)
            positions[row, column:column + len(ids)] = torch.arange(position, position + len(ids))
        if self.packed:  # tail of the row: any position that a model has
            positions[:, self.width:] = 0
        rows = torch.tensor([row * width + column for row, column in self.at], dtype=torch.long)
        spread = torch.tensor(self.spread, dtype=torch.long)
        spread[spread < 0] = len(self.targets)
        return MicroBatch(tokens.to(device), positions.to(device), self.lengths, self.indices, rows.to(device),
                          torch.tensor(self.targets, dtype=torch.long).to(device), spread.to(device), tuple(self.segments) if self.packed else None, self._choices(width, device))

    def _choices(self, width: int, device: torch.device | str) -> Tensor | None:
        if not self.experts:
            return None
        out = torch.full((width, *self.experts[0][1].shape[1:]), -1, dtype=torch.long)
        for column, chosen in self.experts:
            out[column:column + len(chosen)] = chosen
        return out.to(device)
