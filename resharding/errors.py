"""What can be wrong with a weight move. None of these is bad user input: see `parallel.errors` for that."""

from __future__ import annotations

from collections.abc import Iterable


class CoverageError(ValueError):
    """A plan would write a destination element never or twice, or leave a canonical tensor unread."""


class WeightsError(RuntimeError):
    """Weights in memory are not what they must be: the message names the tensor."""


class SyncError(RuntimeError):
    """A collective weight operation failed on some rank; raised on every rank, nothing was committed."""


def listed(names: Iterable[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - limit} more" if len(unique) > limit else ""
    return ", ".join(unique[:limit]) + more
