"""Copies within one rank, and padding."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from resharding.boxes import slices
from resharding.errors import WeightsError
from resharding.plan import Plan


@dataclass(frozen=True)
class MoveReport:
    """`bytes` written into this rank's destination tensors (padding aside), wall-clock `seconds`."""

    bytes: int
    seconds: float


def execute(plan: Plan, source: Mapping[str, Any], destination: Mapping[str, torch.Tensor], rank: int) -> MoveReport:
    """Run the plan where nothing has to travel to or from `rank`.

    `source` values are tensors or anything that gives a tensor when sliced (safetensors slices). Values are cast to the
    destination dtype. Raises WeightsError where the plan needs another rank.
    """
    for copy in plan.copies:
        if rank in (copy.src_rank, copy.dst_rank) and copy.src_rank != copy.dst_rank:
            raise WeightsError(f"{copy.canonical} must travel from rank {copy.src_rank} to rank {copy.dst_rank}: "
                               "use the point-to-point transport")
    return copy_own(plan, source, destination, rank)


@torch.no_grad()
def copy_own(plan: Plan, source: Mapping[str, Any], destination: Mapping[str, torch.Tensor], rank: int) -> MoveReport:
    """The part of the plan that stays on `rank`: copies from itself to itself, and its padding."""
    started, moved = time.perf_counter(), 0
    for copy in plan.copies:
        if copy.src_rank == rank == copy.dst_rank:
            target = copy.dst_view.of(destination[copy.dst_tensor])[slices(copy.dst_box)]
            target.copy_(copy.src_view.of(source[copy.src_tensor])[slices(copy.src_box)])
            moved += copy.nbytes
    for padding in plan.paddings:
        if padding.rank == rank:
            padding.view.of(destination[padding.tensor])[slices(padding.box)].zero_()
    return MoveReport(moved, time.perf_counter() - started)
