"""On ranks of the pool: models that Megatron-Core really built, saved and loaded, for the tests of conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch


def _build(directory: str, parallel: dict[str, Any], world: Any) -> Any:
    from checkpoint.hf import read_hf
    from parallel.config import ParallelConfig
    from parallel.model_config import ModelConfig
    from parallel.training import build
    from resharding.layouts import mcore_layout

    model = ModelConfig.from_directory(directory)
    training = build(model, ParallelConfig(**parallel), model.dtype, world.device, world.rank, world.size, 1, layer_implementation="torch")
    read_hf(directory, mcore_layout(model, training.parallel, world.rank, world.size, training.dtype), training.tensors, model)
    return training


def save_and_load(jobs: list[tuple[str, str, str]], parallel: dict[str, Any]) -> list[list[str]]:
    """For every (Hugging Face directory, destination, Megatron checkpoint): build the first, save it, load the third over it.

    Returns the tensors that the load gave other values. An empty destination: nothing is saved.
    """
    from checkpoint.mcore import load_model, save_model
    from mcore_rl.run import joined

    wrong = []
    with joined("cpu", 1) as world:
        for source, destination, stored in jobs:
            training = _build(source, parallel, world)
            if destination:
                save_model(destination, training, source)
            expected = {name: t.clone() for name, t in training.tensors.items()}
            for tensor in training.tensors.values():
                tensor.fill_(7)
            load_model(stored, training)
            wrong.append([name for name, t in training.tensors.items() if not torch.equal(t, expected[name])])
    return wrong


def megatrons_save(jobs: list[tuple[str, str]]) -> None:
    """On one rank, for every (Hugging Face directory, destination): Megatron's own `save` of the weights, with its local spec's names."""
    from checkpoint.distributed import model_state
    from mcore_rl.run import joined

    with joined("cpu", 1) as world:
        for source, destination in jobs:
            with mock.patch("parallel.layers._checkpoint_names", _local_names):
                training = _build(source, {}, world)
            Path(destination).mkdir(parents=True)
            with training.entered():
                _megatrons_save(model_state(training)["model"], destination)


def megatrons_load(jobs: list[tuple[str, str]]) -> list[list[str]]:
    """On one rank, for every (Hugging Face directory, weights): what Megatron's own `load` gives other values."""
    from checkpoint.distributed import load_model_state, model_state
    from mcore_rl.run import joined

    wrong = []
    with joined("cpu", 1) as world:
        for source, stored in jobs:
            training = _build(source, {}, world)
            expected = {name: t.clone() for name, t in training.tensors.items()}
            for tensor in training.tensors.values():
                tensor.fill_(7)
            from megatron.core import dist_checkpointing

            with training.entered():
                state = dist_checkpointing.load({"model": model_state(training)["model"]}, stored)
            load_model_state(training, state)
            wrong.append([name for name, t in training.tensors.items() if not torch.equal(t, expected[name])])
    return wrong


def _local_names(latent: bool, experts: bool) -> dict[str, str]:
    """`sharded_state_dict_keys_map` of get_gpt_layer_local_spec in megatron-core 0.16.1."""
    return {} if latent else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _megatrons_save(state: Any, destination: str) -> None:
    """`dist_checkpointing.save`, with its writers as threads: it forks them, and a fork of a process with threads can hang for ever."""
    import multiprocessing.dummy
    import queue

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # else a process of its own is started for it
    with mock.patch("torch.cuda.synchronize"), mock.patch("torch.cuda.current_device", lambda: "cpu"), \
            mock.patch.object(filesystem_async.mp, "get_context", lambda kind: multiprocessing.dummy):
        dist_checkpointing.save(state, destination)
