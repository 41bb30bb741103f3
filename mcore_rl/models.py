"""Models named on the command line: `hf:DIR` (or DIR) and `mcore:DIR`, into an engine's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint.convert import fill, open_model
from checkpoint.files import MANIFEST
from checkpoint.hf import read_hf
from checkpoint.run_state import verify
from mcore_rl.rollout import Rollout
from mcore_rl.run import World
from mcore_rl.tokens import load_tokenizer
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig


def parse_model(name: str, default: str | None = "hf") -> tuple[str, Path]:
    """(`hf` or `mcore`, directory). Raises UserError for another prefix, or none where `default` is None."""
    kind, colon, rest = name.partition(":")
    if colon and kind in ("hf", "mcore"):
        return kind, Path(rest)
    if not colon and default is not None:
        return default, Path(name)
    raise UserError(f"{name!r}: write hf:DIR for a Hugging Face directory or mcore:DIR for a Megatron checkpoint")


def open_engine(name: str, world: World, tp: int, dtype: str | None, max_batch_size: int = 256, hf_config: str | None = None,
                **options: Any) -> tuple[Rollout, ModelConfig, Any]:
    """Engines over all ranks with the weights of `name`, version 0. Also returns the tokenizer. `options` are further ones of the engine.

    `mcore:DIR` is a converted model, a run's checkpoint, or a directory of Megatron-LM or Megatron-Bridge; weights stream from its files
    into the engine, without a model of Megatron's. `hf_config`: a directory with config.json and tokenizer, where DIR has none.
    Raises UserError for what cannot be read or generated with.
    """
    kind, directory = parse_model(name)
    if kind == "hf" and hf_config is not None:
        raise UserError("--hf-config is for a model mcore:DIR; a Hugging Face directory has its own config.json")

    def make(model: ModelConfig, companions: Path) -> tuple[Rollout, Any]:
        tokenizer = load_tokenizer(companions)
        rollout = Rollout(model, torch_dtype(dtype or model.dtype), tp, max_batch_size, world.device, world.exchange, world.rank, world.size,
                          detokenize=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)), **options)
        rollout.engine.begin_update()
        return rollout, tokenizer

    if kind == "hf":
        model = ModelConfig.from_directory(directory)
        rollout, tokenizer = make(model, directory)
        read_hf(directory, rollout.engine.layouts[world.rank % tp], rollout.engine.weights(), model)
    else:
        if (directory / MANIFEST).is_file():
            verify(directory)
        with open_model(kind, directory, hf_config) as source:
            companions = Path(hf_config) if hf_config else source.companions
            if companions is None:
                raise UserError(f"{name} has no tokenizer beside its weights; give a directory that has one with --hf-config DIR")
            model = source.model
            rollout, tokenizer = make(model, companions)
            fill(source, rollout.engine.layouts[world.rank % tp], rollout.engine.weights())
    rollout.engine.commit(0, None)
    return rollout, model, tokenizer
