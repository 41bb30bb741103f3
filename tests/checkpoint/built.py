"""On ranks of the pool: models that Megatron-Core really built, saved and loaded, for the tests of conversion."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def _build(directory: str, parallel: dict[str, Any], world: Any, filled: bool = True) -> Any:
    from checkpoint.hf import read_hf
    from parallel.config import ParallelConfig
    from parallel.model_config import ModelConfig
    from parallel.training import build
    from resharding.layouts import mcore_layout

    model = ModelConfig.from_directory(directory)
    training = build(model, ParallelConfig(**parallel), model.dtype, world.device, world.rank, world.size, 1, layer_implementation="torch")
    if filled:
        read_hf(directory, mcore_layout(model, training.parallel, world.rank, world.size, training.dtype), training.tensors, model)
    return training


def save_models(jobs: list[tuple[str, str]], parallel: dict[str, Any], native: bool = False) -> None:
    """For every (Hugging Face directory, destination): build, fill, save. `native`: the weights alone, by Megatron's own `save`."""
    from checkpoint.distributed import model_state
    from checkpoint.mcore import save_model
    from mcore_rl.run import joined

    with joined("cpu", 1) as world:
        for source, destination in jobs:
            training = _build(source, parallel, world)
            if native:
                Path(destination).mkdir(parents=True)
                with training.entered(), _children_allowed():
                    _megatrons_save(model_state(training)["model"], destination)
            else:
                save_model(destination, training, source)


def _megatrons_save(state: Any, destination: str) -> None:
    import queue

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # else a process of its own is started for it
    with mock.patch("torch.cuda.synchronize"), mock.patch("torch.cuda.current_device", lambda: "cpu"):
        dist_checkpointing.save(state, destination)


@contextlib.contextmanager
def _children_allowed() -> Iterator[None]:
    """The pool's workers are daemons, which may have no children; Megatron's writer is one."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings["daemon"] = False
    try:
        yield
    finally:
        settings["daemon"] = True


def load_models(jobs: list[tuple[str, str]], parallel: dict[str, Any], native: bool = False) -> list[list[str]]:
    """For every (Hugging Face directory, Megatron checkpoint): the tensors that a model loaded from the second has otherwise than
    the first gives them. `native`: by Megatron's own `load`, from the directory of the weights."""
    from checkpoint.distributed import load_model_state, model_state
    from checkpoint.mcore import load_model
    from mcore_rl.run import joined

    wrong = []
    with joined("cpu", 1) as world:
        for source, stored in jobs:
            expected = {name: t.clone() for name, t in _build(source, parallel, world).tensors.items()}
            training = _build(source, parallel, world, filled=False)
            for tensor in training.tensors.values():
                tensor.fill_(7)
            if native:
                from megatron.core import dist_checkpointing

                with training.entered():
                    state = dist_checkpointing.load({"model": model_state(training)["model"]}, stored)
                load_model_state(training, state)
            else:
                load_model(stored, training)
            wrong.append([name for name, t in training.tensors.items() if not torch.equal(t, expected[name])])
    return wrong
