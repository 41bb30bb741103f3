"""Phases of a step: each declares the columns it reads and adds, is checked for them, timed and traced."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcore_rl.memory import watched
from mcore_rl.sample import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """What a phase promises. `timer` is the metric that its seconds are added to."""

    name: str
    timer: str
    reads: tuple[str, ...]
    adds: tuple[str, ...]
    doc: str


PHASES: dict[str, Phase] = {}


def phase(timer: str, reads: tuple[str, ...] = (), adds: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare `function(run, batch)` a phase. Raises RuntimeError where a column is missing before or after it."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        PHASES[name] = Phase(name, timer, reads, adds, (function.__doc__ or "").strip().splitlines()[0])

        @functools.wraps(function)
        def checked(run: Any, batch: Batch) -> None:
            _require(name, "reads", reads, batch)
            run.on_phase(name)
            started = time.perf_counter()
            with watched(run, name, batch):
                function(run, batch)
            seconds = time.perf_counter() - started
            _require(name, "promised to add", adds, batch)
            batch.metrics[timer] = batch.metrics.get(timer, 0.0) + seconds
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%-22s %7.3f s  rank %d of %d  reads %s  adds %s", name, seconds, run.rank, run.world_size,
                             _shapes(reads, batch), _shapes(adds, batch))

        return checked

    return declare


def _require(name: str, verb: str, columns: tuple[str, ...], batch: Batch) -> None:
    missing = [c for c in columns if not batch.has(c)]
    if missing:
        raise RuntimeError(f"phase {name} {verb} {', '.join(missing)}, which step {batch.step} does not have")


def _shapes(columns: tuple[str, ...], batch: Batch) -> str:
    """`name[samples x tokens]` for per-token columns, `name[samples]` for numbers."""
    shown = []
    for column in columns:
        values = batch.columns.get(column) or [getattr(s, column, None) for s in batch.samples] or batch.rows
        first = values[0] if len(values) else None
        ragged = isinstance(first, tuple) or getattr(first, "ndim", 0) == 1
        shown.append(f"{column}[{len(values)}" + (f" x {min(map(len, values))}..{max(map(len, values))}]" if ragged else "]"))
    return ", ".join(shown) or "-"


def table() -> str:
    """The phases as a Markdown table, for the documentation."""
    lines = ["| phase | what it does | reads | adds | timer |", "|---|---|---|---|---|"]
    for p in PHASES.values():
        lines.append(f"| `{p.name}` | {p.doc} | {', '.join(f'`{c}`' for c in p.reads) or '-'} "
                     f"| {', '.join(f'`{c}`' for c in p.adds) or '-'} | `{p.timer}` |")
    return "\n".join(lines)
