"""Ranks of the distributed checkpoint tests: build a tiny model, train, save, load."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from checkpoint import distributed, mcore, rng
from parallel.config import ParallelConfig
from parallel.device import Device, prepare_megatron, select_device
from parallel.micro_batch import make_micro_batches
from parallel.model_config import ModelConfig
from parallel.training import OptimizerConfig, TrainingModel, build

MODEL = dict(family="llama", hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8,
             vocab_size=61, max_position_embeddings=64, make_vocab_size_divisible_by=2, init_std=0.2)
Tensors = dict[str, torch.Tensor]


def prepared_device() -> Device:
    device = select_device("cpu")
    prepare_megatron(device)
    return device


def make(layout: dict[str, Any], seed: int = 1, distributed_optimizer: bool = True, dtype: str = "float32",
         optimizer: dict[str, Any] | None = None, **changes: Any) -> TrainingModel:
    device = prepared_device()
    torch.manual_seed(seed)
    defaults = dict(lr=1e-2, distributed=distributed_optimizer, warmup_steps=3, schedule="cosine", decay_steps=10, weight_decay=0.1)
    options = OptimizerConfig(**{**defaults, **(optimizer or {})})
    training = build(ModelConfig(**{**MODEL, **changes}), ParallelConfig(**layout), dtype, device, dist.get_rank(), dist.get_world_size(),
                     seed, options)
    training.reload_main_params()
    return training


def steps(training: TrainingModel, first: int, count: int) -> list[tuple[float, float]]:
    """(gradient norm, learning rate) of training steps on sequences that depend on the step number alone."""
    results = []
    dp = training.parallel.dp(dist.get_world_size())
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        sequences = torch.randint(0, MODEL["vocab_size"], (4, 12), generator=generator).tolist()  # type: ignore[call-overload]
        mine = list(range(training.at.dp, 4, dp))
        micro_batches = make_micro_batches(sequences, [[i] for i in mine], training.parallel)
        training.forward_backward(micro_batches, lambda micro_batch, log_probs, entropy: (-log_probs.sum() / 44, {}))
        results.append(training.optimizer_step())
    return results


def plain(directory: Path) -> Tensors:
    """All tensors of a checkpoint, whole (a collective)."""
    from megatron.core import dist_checkpointing

    return {key: value.clone() for key, value in dist_checkpointing.load_plain_tensors(str(directory)).items() if torch.is_tensor(value)}


def train_and_save(directory: str, layout: dict[str, Any], **options: Any) -> Any:
    """Two steps, save, two more: their results, and this rank's parameters at the end."""
    training = make(layout, **options)
    steps(training, 0, 2)
    distributed.save_training(Path(directory), training)
    after = steps(training, 2, 2)
    return after, {name: tensor.detach().clone() for name, tensor in training.tensors.items()}


def load_and_train(directory: str, layout: dict[str, Any], **options: Any) -> Any:
    """Load into a model of other weights, save again, compare the files, two steps: (differing keys, keys, results, parameters)."""
    training = make(layout, seed=77, **options)
    distributed.load_training(Path(directory), training)
    again = Path(directory + "-again")
    distributed.save_training(again, training)
    before, after = plain(Path(directory)), plain(again)
    differing = [key for key in before if key not in after or not equal(before[key], after[key])]
    return (differing + sorted(set(after) - set(before)), sorted(before), steps(training, 2, 2),
            {name: tensor.detach().clone() for name, tensor in training.tensors.items()})


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; of a vocabulary, whose padding depends on tp, the real rows."""
    if a.shape != b.shape and a.dim() == 2:
        a, b = a[:MODEL["vocab_size"]], b[:MODEL["vocab_size"]]  # type: ignore[misc]
    return torch.equal(a, b)


def save_untrained_and_load(directory: str) -> Any:
    """A checkpoint from before the first step, then the first steps from it and without it."""
    training = make({})
    distributed.save_training(Path(directory), training)
    expected = steps(training, 0, 2)
    other = make({}, seed=5)
    distributed.load_training(Path(directory), other)
    return expected, steps(other, 0, 2)


def load_wrong(directory: str, **options: Any) -> str:
    try:
        distributed.load_training(Path(directory), make({}, **options))
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def save_with_bad_state(directory: str, kind: str) -> str:
    """The error every rank sees when the state of one rank is wrong or cannot be written."""
    training = make({"tp": 2})
    state = distributed.model_and_optimizer_state(training, loading=False)
    if kind == "unwritable":
        Path(directory).write_text("a file where the directory should be")
    elif dist.get_rank() == 1:
        key = "embedding.word_embeddings.weight"
        if kind == "hole":
            del state["model"][key]
        elif kind == "overlap":
            state["model"][key].global_offset, state["model"][key].replica_id = (0, 0), (0, 0, 0)
    try:
        distributed.save_sharded(Path(directory), state)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def tracker_draw(training: TrainingModel) -> float:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with training.entered(), get_cuda_rng_tracker().fork():
        return float(torch.rand(()))


def random_streams(directory: str, layout: dict[str, Any], save: bool) -> Any:
    """Save the streams or restore them, then draw from each: (restored, draws)."""
    training = make(layout)
    random.seed(dist.get_rank() + 10 * save)
    numpy.random.seed(dist.get_rank() + 10 * save)
    torch.manual_seed(dist.get_rank() + 10 * save)
    draw()
    restored = None
    if save:
        tracker_draw(training)
        Path(directory).mkdir(exist_ok=True)
        rng.save_rng(Path(directory), {"actor": training})
    else:
        restored = rng.load_rng(Path(directory), {"actor": training})
    return restored, draw(), tracker_draw(training)


def write_model_directory(directory: str, source: str, layout: dict[str, Any]) -> Tensors:
    model = ModelConfig.from_directory(source, make_vocab_size_divisible_by=2)
    training = make_of(model, layout, 3)
    mcore.save_model(directory, training, source)
    return plain(Path(directory) / "weights")


def read_model_directory(directory: str, layout: dict[str, Any]) -> Tensors:
    training = make_of(mcore.model_config_of(directory), layout, 8)
    mcore.load_model(directory, training)
    mcore.save_model(directory + "-again", training, Path(directory) / "hf")
    return plain(Path(directory + "-again") / "weights")


def make_of(model: ModelConfig, layout: dict[str, Any], seed: int) -> TrainingModel:
    device = prepared_device()
    torch.manual_seed(seed)
    return build(model, ParallelConfig(**layout), "float32", device, dist.get_rank(), dist.get_world_size(), seed)
