"""All ranks decide together: what one rank does or suffers, every rank learns.

Without an initialised process group these are plain calls, so that one process may read and write checkpoints too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from parallel.errors import UserError

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names rank, directory and cause."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def catchable() -> tuple[type[BaseException], ...]:
    """What counts as a failure of the work: torch's CheckpointException derives from BaseException, not Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    return (Exception, CheckpointException)


def raise_together(error: BaseException | None, doing: str) -> None:
    """Collective. Return where no rank has an error; else raise on every rank the first rank's: a UserError stays one,
    anything else becomes a CheckpointError that names the rank and what it was `doing`."""
    told = None if error is None else (isinstance(error, UserError), f"{type(error).__name__}: {_text(error)}", _text(error))
    for at, other in enumerate(gather(told)):
        if other is None:
            continue
        by_user, named, text = other
        if by_user:
            raise UserError(text) from error
        raise CheckpointError(f"{doing} failed on rank {at}: {named}") from error


def _text(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # CheckpointException: {rank: (exception, traceback)}
    if isinstance(failures, dict):
        return "; ".join(f"rank {at}: {type(wrapped[0]).__name__}: {wrapped[0]}" for at, wrapped in failures.items())
    return str(error)


def on_rank_zero(function: Callable[[], T], doing: str) -> T:
    """Collective. Rank 0 calls `function`; every rank gets its result, or its error."""
    result, error = None, None
    if rank() == 0:
        try:
            result = function()
        except catchable() as caught:
            error = caught
    raise_together(error, doing)
    return gather(result)[0]
