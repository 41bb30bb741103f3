"""Parts of the documentation that are generated from the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from mcore_rl import steps, critic, evaluation; from mcore_rl.phases import table; print(table())"
START, END = "<!-- phases: generated -->\n", "<!-- end of phases -->"


def test_the_table_of_phases_is_up_to_date() -> None:
    """In a process of its own: phases are declared by importing, and other tests import more."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    page = (ROOT / "docs/architecture.md").read_text()
    assert page.count(START) == page.count(END) == 1
    assert page.split(START)[1].split(END)[0] == done.stdout, f"put the output of `python -c \"{PROGRAM}\"` between the markers"


def test_every_metric_of_a_record_is_explained() -> None:
    from mcore_rl.outputs import METRIC_KEYS

    page = (ROOT / "docs/architecture.md").read_text()
    assert not [key for key in METRIC_KEYS if f"`{key}`" not in page]
