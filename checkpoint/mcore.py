"""A model alone in Megatron's distributed format: what `mcore:DIR` means on the command line.

    DIR/weights/        Megatron's `torch_dist` checkpoint; does not depend on the parallel layout that wrote it
    DIR/hf/             config.json, tokenizer and chat template, as in a Hugging Face directory
    DIR/metadata.json   format, dtype and vocabulary padding
    DIR/manifest.json   size and digest of every file
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from checkpoint.distributed import OPTIMIZER_PREFIX, load_model_state, load_sharded, model_state, save_sharded
from checkpoint.hf_config import write_companions
from checkpoint.publish import whole_directory
from checkpoint.run_state import verify
from checkpoint.together import on_rank_zero
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.training import TrainingModel

FORMAT = "mcore-rl model 1"
_HOW = "write it with `mcore-rl convert hf:DIR mcore:DIR`"


@dataclass(frozen=True)
class ModelDirectory:
    """What `metadata.json` says."""

    format: str
    dtype: str
    make_vocab_size_divisible_by: int


def save_model(directory: str | Path, training: TrainingModel, source_hf_dir: str | Path | None = None,
               overwrite: bool = False) -> None:
    """Collective: write the weights of `training` to `directory`, whole or not at all.

    Tokenizer files are copied from `source_hf_dir`. Raises UserError where `directory` exists and `overwrite` is not set.
    """
    target = Path(directory)
    on_rank_zero(lambda: _refuse_existing(target, overwrite), f"writing {target}")
    with whole_directory(target) as temporary:
        with training.entered():
            state = model_state(training)
        save_sharded(temporary / "weights", state)
        on_rank_zero(lambda: _write_companions(temporary, training, source_hf_dir), f"writing {target}")


def describe_model(directory: Path, training: TrainingModel, source_hf_dir: str | Path | None) -> None:
    """Rank 0: put `hf/` and `model.json` beside the weights of a run's checkpoint, so that it is a model directory too."""
    _write_companions(directory, training, source_hf_dir, "model.json")


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if not overwrite and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"output directory {str(target)!r} exists and is not empty; give another one or delete it")


def _write_companions(directory: Path, training: TrainingModel, source: str | Path | None, name: str = "metadata.json") -> None:
    describe_weights(directory, training.model, str(training.dtype).removeprefix("torch."), source, name)


def describe_weights(directory: Path, model: ModelConfig, dtype: str, source: str | Path | None, name: str = "metadata.json") -> None:
    """Put `hf/` and what describes the format beside weights that are there already."""
    (directory / "hf").mkdir()
    write_companions(directory / "hf", model, dtype, source)
    facts = {"format": FORMAT, "dtype": dtype, "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by}
    (directory / name).write_text(json.dumps(facts, indent=1) + "\n")


def is_model_directory(directory: Path) -> bool:
    """Whether `save_model`, `mcore-rl convert` or a run wrote it: its description is there and is of this format."""
    try:
        read_metadata(directory)
        return True
    except UserError:
        return False


def read_metadata(directory: str | Path) -> ModelDirectory:
    """What describes a model directory. Raises UserError for anything that neither `save_model` nor a run wrote."""
    path = Path(directory) / "model.json"  # a run's checkpoint, whose metadata.json is Megatron's own
    path = path if path.is_file() else Path(directory) / "metadata.json"
    try:
        data = json.loads(path.read_text())
        if data.get("format") != FORMAT:
            raise UserError(f"{path} has format {data.get('format')!r}; allowed: {FORMAT!r}; {_HOW}")
        return ModelDirectory(data["format"], str(data["dtype"]), int(data["make_vocab_size_divisible_by"]))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{str(directory)!r} is no model in Megatron's format ({path.name}: {error}); {_HOW}") from None


def model_config_of(directory: str | Path) -> ModelConfig:
    """The architecture of a model directory; its `hf/` is where the tokenizer is read from."""
    found = read_metadata(directory)
    return ModelConfig.from_directory(Path(directory) / "hf", dtype=found.dtype,
                                      make_vocab_size_divisible_by=found.make_vocab_size_divisible_by)


def weights_of(directory: Path) -> Path:
    """Where the `torch_dist` checkpoint is in a model directory."""
    return directory / "weights" if (directory / "weights").is_dir() else directory


def load_model(directory: str | Path, training: TrainingModel) -> None:
    """Collective: read the weights of a model directory into `training`, under any layout. Damage is found by its manifest.

    Raises UserError for a damaged directory or another model's.
    """
    verify(directory)
    with training.entered():
        state = model_state(training)
    load_model_state(training, load_sharded(weights_of(Path(directory)), state, ignore=OPTIMIZER_PREFIX))
    training.reload_main_params()
