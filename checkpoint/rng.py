"""The random streams of every rank: Python, NumPy, torch (CPU and CUDA) and Megatron's tracker of each role."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from checkpoint.publish import load_rank_file, save_rank_file
from checkpoint.together import gather, raise_together, rank, world_size
from parallel.training import TrainingModel

logger = logging.getLogger(__name__)
NAME = "rng"


def save_rng(directory: Path, roles: Mapping[str, TrainingModel]) -> None:
    """Each rank writes its streams to a file of its own in `directory`."""
    save_rank_file(directory, NAME, {"layout": _layout(roles), **_streams(roles)})


def load_rng(directory: Path, roles: Mapping[str, TrainingModel]) -> bool:
    """Collective: restore the streams where world and layouts are those of the checkpoint; True where that was done.

    Under another layout streams have no counterpart: they are left as they are, with a warning.
    """
    stored, error = None, None
    try:
        stored = load_rank_file(directory, NAME)
    except Exception as caught:  # torch.load has no common base for what it raises on a damaged file
        error = caught
    raise_together(error, f"reading the random states in {directory}")
    if not all(gather(stored is not None and stored["layout"] == _layout(roles))):
        if rank() == 0:
            logger.warning("%s was written under another parallel layout: random streams start anew from the seed", directory)
        return False
    assert stored is not None
    _restore(stored, roles)
    return True


def _layout(roles: Mapping[str, TrainingModel]) -> str:
    return f"{world_size()} ranks; " + "; ".join(f"{name}: {roles[name].parallel}" for name in sorted(roles))


def _streams(roles: Mapping[str, TrainingModel]) -> dict[str, Any]:
    kind, keys, *rest = numpy.random.get_state()  # type: ignore[misc]
    return {
        "python": random.getstate(), "numpy": (str(kind), torch.from_numpy(numpy.asarray(keys).astype("int64")), *rest),
        "torch": torch.random.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "trackers": {name: _tracker_states(training) for name, training in roles.items()},
    }


def _restore(stored: dict[str, Any], roles: Mapping[str, TrainingModel]) -> None:
    version, numbers, gauss = stored["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = stored["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.random.set_rng_state(stored["torch"])
    if stored["cuda"]:
        torch.cuda.set_rng_state_all(stored["cuda"])
    for name, training in roles.items():
        _set_tracker_states(training, stored["trackers"][name])


def _tracker_states(training: TrainingModel) -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with training.entered():
        return dict(get_cuda_rng_tracker().get_states())


def _set_tracker_states(training: TrainingModel, states: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with training.entered():
        get_cuda_rng_tracker().set_states(states)
