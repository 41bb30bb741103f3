"""Models named on the command line: `hf:DIR` (or DIR) and `mcore:DIR`, into a trainer's or an engine's tensors."""

from __future__ import annotations

from pathlib import Path

from checkpoint.hf import read_hf
from checkpoint.mcore import load_model, model_config_of
from mcore_rl.rollout import Rollout
from mcore_rl.run import World
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig
from parallel.training import build


def parse_model(name: str, default: str | None = "hf") -> tuple[str, Path]:
    """(`hf` or `mcore`, directory). Raises UserError for another prefix, or none where `default` is None."""
    kind, colon, rest = name.partition(":")
    if colon and kind in ("hf", "mcore"):
        return kind, Path(rest)
    if not colon and default is not None:
        return default, Path(name)
    raise UserError(f"{name!r}: write hf:DIR for a Hugging Face directory or mcore:DIR for a Megatron checkpoint")


def open_engine(name: str, world: World, tp: int, dtype: str | None, max_batch_size: int = 256) -> tuple[Rollout, ModelConfig, Path]:
    """Engines over all ranks with the weights of `name`, version 0. Also returns where config and tokenizer are."""
    kind, directory = parse_model(name)
    if kind == "hf":
        model = ModelConfig.from_directory(directory)
    else:
        model = model_config_of(directory)
    rollout = Rollout(model, torch_dtype(dtype or model.dtype), tp, max_batch_size, world.device, world.exchange, world.rank, world.size)
    engine = rollout.engine
    if kind == "hf":
        engine.begin_update()
        read_hf(directory, engine.layouts[world.rank % tp], engine.weights(), model)
        engine.commit(0, None)
        return rollout, model, directory
    training = build(model, ParallelConfig(), dtype or model.dtype, world.device, world.rank, world.size, 0)
    load_model(directory, training)
    rollout.sync(training, 0)
    return rollout, model, directory / "hf"
