"""Ranks agree that all of them succeeded, so that none goes on alone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from resharding.errors import SyncError, WeightsError


def agree(what: str, error: Exception | None = None, payload: Any = None, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Collective over `group`: the payloads of all ranks in rank order, or an error on every rank where any has failed.

    Raises WeightsError where every failure is one (the message names the tensors), else SyncError; the message begins
    with `what` and carries the rank and text of each failure.
    """
    mine = None if error is None else (isinstance(error, WeightsError), f"{type(error).__name__}: {error}")
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        everyone = [(dist.get_rank() if dist.is_initialized() else 0, mine, payload)]
    else:
        everyone = [None] * dist.get_world_size(group)  # type: ignore[list-item]
        dist.all_gather_object(everyone, (dist.get_rank(), mine, payload), group=group)
    failed = [(rank, failure) for rank, failure, _ in everyone if failure is not None]
    if failed:
        text = "; ".join(f"rank {rank}: {message}" for rank, (_, message) in failed)
        kind = WeightsError if all(is_weights for _, (is_weights, _) in failed) else SyncError
        raise kind(f"{what}: {text}") from error
    return [payload for _, _, payload in everyone]
