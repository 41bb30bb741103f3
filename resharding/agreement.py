"""Ranks agree that all of them succeeded, so that none goes on alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from parallel.errors import UserError
from resharding.errors import CoverageError, SyncError, WeightsError


@dataclass
class Step:
    """What this rank hands to the others at the end of a step, and what all of them handed over, in rank order."""

    payload: Any = None
    payloads: list[Any] = field(default_factory=list)


@contextmanager
def together(what: str, group: dist.ProcessGroup | None = None) -> Iterator[Step]:
    """A step that all ranks of `group` do: where any of them raises inside, every rank raises at its end.

    The error is UserError, WeightsError or CoverageError where all failures are of that kind, else SyncError; its message begins with
    `what` and carries rank and text of each failure. The body must keep collective order also where it fails.
    """
    step, error = Step(), None
    try:
        yield step
    except Exception as caught:
        error = caught
    step.payloads = _gather(what, error, step.payload, group)


def _gather(what: str, error: Exception | None, payload: Any, group: dist.ProcessGroup | None) -> list[Any]:
    kind = next((k for k in (UserError, WeightsError, CoverageError) if isinstance(error, k)), SyncError)
    text = str(error) if kind is not SyncError else f"{type(error).__name__}: {error}"
    mine = (dist.get_rank() if dist.is_initialized() else 0, None if error is None else (kind, text), payload)
    everyone: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        if not _anything(error is not None or payload is not None, group):
            return [None] * dist.get_world_size(group)
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    failed = [(rank, *failure) for rank, failure, _ in everyone if failure is not None]
    if failed:
        kinds = {k for _, k, _ in failed}
        by_text: dict[str, list[str]] = {}
        for rank, _, text in failed:
            by_text.setdefault(text, []).append(str(rank))
        message = "; ".join(f"{text} (rank {', '.join(ranks)})" if len(everyone) > 1 else text for text, ranks in by_text.items())
        raise (kinds.pop() if len(kinds) == 1 else SyncError)(f"{what}: {message}") from error
    return [payload for _, _, payload in everyone]


def _anything(mine: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether any rank has something to say: one small reduction, where gathering objects takes several times as long."""
    device = "cpu" if "gloo" in dist.get_backend_config(group) else "cuda"
    found = torch.tensor(int(mine), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found.item())
