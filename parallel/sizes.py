"""Parallel sizes in one word, as they are spoken: `tp4pp8ep16`."""

from __future__ import annotations

import re
from typing import Any

from parallel.config import ParallelConfig
from parallel.errors import UserError, nearest

NAMES = {"tp": "tp", "pp": "pp", "vpp": "vpp", "cp": "cp", "ep": "ep", "etp": "etp", "first": "first_stage_layers", "last": "last_stage_layers"}


def sizes(text: str, allowed: tuple[str, ...] = tuple(NAMES)) -> dict[str, int]:
    """`tp2pp1` -> {"tp": 2, "pp": 1}. Raises UserError for anything else, with the allowed names."""
    found: dict[str, int] = {}
    parts = re.findall(r"([a-z]+)(\d+)", text)
    if not parts or "".join(n + v for n, v in parts) != text:
        raise UserError(f"layout {text!r} is not a layout: write sizes one after the other, e.g. tp4pp2; allowed: {', '.join(allowed)}")
    for name, value in parts:
        if name not in allowed:
            guess = nearest(name, allowed)
            raise UserError(f"layout {text!r}: {name!r} is not a size; allowed: {', '.join(allowed)}" + (f"; did you mean {guess!r}?" if guess else ""))
        if name in found or int(value) < 1:
            raise UserError(f"layout {text!r}: {name}{value} " + ("is given twice" if name in found else "must be at least 1"))
        found[name] = int(value)
    return found


def parallel_config(text: str, **more: Any) -> ParallelConfig:
    """`tp4pp8ep16etp1first11last11` as a ParallelConfig; sequence parallel wherever tp > 1."""
    found = {NAMES[name]: value for name, value in sizes(text).items()}
    return ParallelConfig(**{"sequence_parallel": found.get("tp", 1) > 1, **found, **more})
