"""Samples on disk: what run.only=rollout stores and rollout.replay trains from, one JSONL file a step."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.sample import Sample
from parallel.errors import UserError


def stored_file(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"step_{step:06d}.jsonl"


def store_samples(directory: str | Path, step: int, samples: Sequence[Sample]) -> Path:
    """Write the samples of a step, whole or not at all."""
    path = stored_file(directory, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        for sample in samples:
            file.write(json.dumps(sample.to_json()) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def load_samples(directory: str | Path, step: int) -> list[Sample]:
    """The samples of a step in canonical order. Raises UserError where there are none or a line cannot be read."""
    path = stored_file(directory, step)
    if not path.is_file():
        have = sorted(p.stem for p in Path(directory).glob("step_*.jsonl"))
        raise UserError(f"rollout.replay: {path} does not exist; {directory} holds {', '.join(have[:8]) or 'no stored steps'}; "
                        "store more with run.only=rollout, or lower run.steps")
    samples = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            samples.append(Sample.from_json(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(f"rollout.replay: {path} line {number} is not a stored sample: {error}") from None
    if not samples:
        raise UserError(f"rollout.replay: {path} is empty")
    return sorted(samples, key=lambda s: (s.group, s.index))
