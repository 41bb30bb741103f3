"""The ranks of one engine act as one: what its first rank finds, all of them know, errors too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from parallel.errors import UserError
from resharding.errors import CoverageError, WeightsError
from trtllm_rollout.driver.serving import EngineTimeout
from trtllm_rollout.protocol import EngineRefuses

T = TypeVar("T")
_KINDS = (UserError, EngineTimeout, EngineRefuses, WeightsError, CoverageError)


class Ranks:
    """The `ranks` (of the world) of a replica, this one being number `index`; `group` carries host objects (gloo), None for one rank."""

    def __init__(self, ranks: tuple[int, ...], index: int, group: dist.ProcessGroup | None = None) -> None:
        self.ranks, self.index, self.group = ranks, index, group

    @property
    def leads(self) -> bool:
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in order."""
        if len(self.ranks) == 1:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, function: Callable[[], T]) -> T:
        """Collective: `function()` on the first rank alone; all get what it returned, or raise what it raised."""
        said: list[Any] = [None]
        error: Exception | None = None
        if self.leads:
            try:
                said = [(None, function())]
            except Exception as caught:
                error = caught
                said = [(_kind(caught), str(caught))]
        if len(self.ranks) > 1:
            dist.broadcast_object_list(said, src=self.ranks[0], group=self.group)
        kind, value = said[0]
        if error is not None:
            raise error
        if kind is not None:
            raise kind(f"rank {self.ranks[0]}: {value}")
        return value  # type: ignore[no-any-return]

    def all(self, function: Callable[[], T]) -> list[T]:
        """Collective: `function()` on every rank; what each returned. Raises on all of them where any raised."""
        error: Exception | None = None
        said: Any = None
        try:
            said = (None, function())
        except Exception as caught:
            error, said = caught, (_kind(caught), f"{type(caught).__name__}: {caught}")
        everyone = self.gather(said)
        failed = [(rank, kind, text) for rank, (kind, text) in zip(self.ranks, everyone, strict=True) if kind is not None]
        if error is not None:
            raise error
        if failed:
            raise failed[0][1](f"rank {failed[0][0]}: {failed[0][2]}")
        return [value for _, value in everyone]


def _kind(error: Exception) -> type[Exception]:
    return next((kind for kind in _KINDS if isinstance(error, kind)), EngineRefuses)
