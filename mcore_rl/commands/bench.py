"""`mcore-rl bench NAME [--json] [options]`: one question, measured beside a rival or a physical limit in the same run."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_rl.cli import command
from parallel.errors import UserError, nearest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def add(commands: Any) -> None:
    p = command(commands, "bench", "Measure one question beside a rival or a physical limit; the files are in benchmarks/.",
                "mcore-rl bench reshard --train tp2 --rollout tp2 --procs 2 --json")
    p.add_argument("name", metavar="NAME", help="what to measure: " + (", ".join(_names()) or "nothing here (benchmarks/ is not beside the packages)"))
    p.add_argument("--json", action="store_true", help="print the figures as one JSON object on the last line")
    p.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark; `mcore-rl bench NAME --help` lists them")


def _names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("[!_]*.py") if "\ndef measure(" in p.read_text())  # others are scripts of their own


def execute(arguments: argparse.Namespace) -> int:
    if arguments.name not in _names():
        guess = nearest(arguments.name, _names())
        raise UserError(f"benchmark {arguments.name!r} does not exist; there are: {', '.join(_names()) or 'none (run from a checkout)'}"
                        + (f"; did you mean {guess!r}?" if guess else ""))
    if str(FOLDER.parent) not in sys.path[:1]:
        sys.path.insert(0, str(FOLDER.parent))
    module = importlib.import_module(f"benchmarks.{arguments.name}")
    options = [o for o in arguments.options if o != "--json"]
    figures: dict[str, Any] | None = module.measure(options)
    if figures is None:  # another rank reports
        return 0
    table = Table(title=module.__doc__.splitlines()[0], title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    shown = {f"{key}.{part}" if part else key: number for key, value in figures.items()
             for part, number in (value.items() if isinstance(value, dict) else [("", value)])}
    for key, value in shown.items():
        table.add_row(key, f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if arguments.json or "--json" in arguments.options:
        print(json.dumps(figures), flush=True)
    return 0
