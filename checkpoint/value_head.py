"""Value models (critics, reward models) from Hugging Face directories, with the head they hold or a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from checkpoint.hf import read_hf
from checkpoint.hf_check import VALUE_HEAD, VALUE_HEAD_ALIASES
from checkpoint.hf_files import HFFiles
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.training import TrainingModel
from resharding.layouts import mcore_layout


def value_model(directory: str | Path, **changes: Any) -> tuple[ModelConfig, bool]:
    """The architecture of `directory` under a value head, and whether the directory holds one: `score.weight` [1, hidden] or an alias of it.

    Raises UserError where config.json announces a value head (*ForSequenceClassification) that the files lack.
    """
    model = ModelConfig.from_directory(directory, **changes)
    with HFFiles(directory) as files:
        holds = any(name in files for name in (VALUE_HEAD, *VALUE_HEAD_ALIASES))
    if model.head == "value" and not holds:
        raise UserError(f"model directory {str(directory)!r} lacks {VALUE_HEAD}, the head of the {model.hf.get('architectures')} that config.json "
                        "announces; download it again, or give a causal language model's directory to start with a new head")
    return model.with_value_head(), holds


def read_value_model(directory: str | Path, training: TrainingModel, rank: int, world_size: int, holds_head: bool, seed: int,
                     head_std: float) -> None:
    """Fill a value model: its layers and, with `holds_head`, its head from the files; else a new head.

    A head over the vocabulary is neither asked for nor read. A new head is normal with standard deviation `head_std` from `seed`, the same
    under every layout; 0: zeros. Raises UserError as `read_hf` does: a tensor that is missing, unknown or misshapen is named.
    """
    model, divisor = training.model, training.model.make_vocab_size_divisible_by
    if not holds_head:
        model = ModelConfig.from_directory(directory, make_vocab_size_divisible_by=divisor)
    layout = mcore_layout(model, training.parallel, rank, world_size, training.dtype, training.names, head=holds_head)
    read_hf(directory, layout, training.tensors, model)
    if not holds_head:
        numbers = torch.randn(1, model.hidden_size, generator=torch.Generator().manual_seed(seed)) * head_std
        for name, tensor in training.tensors.items():
            if name.endswith("output_layer.weight"):
                tensor.copy_(numbers)
    training.reload_main_params()
