"""Values between roles, by sample and not by rank: small host objects, gathered over the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from resharding.agreement import together

T = TypeVar("T")


class Exchange:
    """Gathers on a gloo group of all ranks, so that host objects never need the accelerator."""

    def __init__(self) -> None:
        self.group = None
        if dist.is_initialized() and dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo")

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, count: int, function: Callable[[int], T], what: str) -> list[T]:
        """`function` of 0..count-1, each rank its share. An error on one rank is raised on all of them."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        with together(what, self.group) as step:
            step.payload = {i: function(i) for i in range(rank, count, size)}
        return [value for _, value in sorted(pair for part in step.payloads for pair in part.items())]

    def merge(self, mine: dict[int, T], count: int, what: str) -> list[T]:
        """Join what the ranks hold by sample. Raises RuntimeError where a sample has no value or two."""
        merged: dict[int, T] = {}
        for part in self.gather(mine):
            twice = merged.keys() & part.keys()
            if twice:
                raise RuntimeError(f"{what}: two ranks gave values for samples {sorted(twice)[:8]}")
            merged.update(part)
        missing = [i for i in range(count) if i not in merged]
        if missing or len(merged) != count:
            raise RuntimeError(f"{what}: no rank gave values for samples {missing[:8]} of {count}")
        return [merged[i] for i in range(count)]
