"""Whether a `torch_dist` checkpoint holds exactly the model of a config; what is wrong is named."""

from __future__ import annotations

import logging
import re

import torch

from checkpoint.torch_dist import TorchDistFiles
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import listed
from resharding.layout import Layout, LocalTensor
from resharding.layouts.mcore_files import mcore_files_layout

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")  # what a run saves beside its model
_APART = re.compile(r"decoder\.layers\.(\d+)\.")
_SINGLE = re.compile(r"linear_fc1\.weight_[wv]$")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_files(files: TorchDistFiles, model: ModelConfig, without_mtp: bool = False, said_by: str = "config.json") -> Layout:
    """The layout of the files, in their own dtypes. Raises UserError that names keys which are missing, unknown or misshapen.

    Stacked layers and layers apart are read, norms under Transformer Engine's and under the local spec's names, and any padding of
    the vocabulary. `said_by` is the file that describes the model. Layers for multi-token prediction are refused unless `without_mtp` leaves them out, with a warning.
    """
    where = f"checkpoint {str(files.directory)!r}"
    keys = [key for key in files if not key.startswith(NOT_WEIGHTS) and "_extra_state" not in key]
    if single := [key for key in keys if _SINGLE.search(key)]:
        raise UserError(f"{where} was saved with singleton_local_shards ({listed(single, 2)}), which is not read; save it without")
    keys = _without_mtp(keys, where, without_mtp)
    rows = int(files[EMBEDDING].shape[0]) if EMBEDDING in files else model.vocab_size
    if rows < model.vocab_size:
        raise UserError(f"{where}: {EMBEDDING} has {rows} rows, {said_by} says vocab_size {model.vocab_size}; one of the two is wrong")
    layers = {int(found[1]) for key in keys if (found := _APART.match(key))}
    layout = mcore_files_layout(model, torch.float32, vocabulary_rows=rows, apart=bool(layers), held=set(keys))
    _compare(files, layout, keys, model, where, layers, said_by)
    return Layout("mcore_files", 0, tuple(LocalTensor(t.name, t.shape, files[t.name].dtype, t.pieces) for t in layout.tensors))


def _without_mtp(keys: list[str], where: str, without_mtp: bool) -> list[str]:
    found = [key for key in keys if key.startswith("mtp.")]
    if found and not without_mtp:
        raise UserError(f"{where} holds layers for multi-token prediction ({listed(found, 2)}), which are not built; leave them out with "
                        "without_mtp (--without-mtp)")
    if found:
        logger.warning("%s: the layers for multi-token prediction (%d tensors) are left out", where, len(found))
    return [key for key in keys if key not in set(found)]


def _compare(files: TorchDistFiles, layout: Layout, keys: list[str], model: ModelConfig, where: str, layers: set[int],
             said_by: str) -> None:
    count = f"; the files hold {max(layers) + 1} layers, {said_by} says {model.num_layers}" if layers and max(layers) + 1 != model.num_layers else ""
    if missing := [local.name for local in layout.tensors if local.name not in files]:
        hint = f"; {said_by} says tie_word_embeddings false, so the head must be there: set it to true if the model ties it" if HEAD in missing else ""
        raise UserError(f"{where} lacks {len(missing)} tensors of its config ({model.family}): {listed(missing)}{hint}{count}")
    if extra := [key for key in keys if key not in layout.by_name]:
        hint = f"; {said_by} says tie_word_embeddings true" if HEAD in extra else ""
        raise UserError(f"{where} holds {len(extra)} tensors that a {model.family} model with its config does not have: {listed(extra)}{hint}{count}")
    for local in layout.tensors:
        held = files[local.name]
        if tuple(held.shape) != local.shape:
            raise UserError(f"{where}: {local.name} has shape {tuple(held.shape)}, {said_by} asks for {local.shape}; one of the two is wrong")
        if held.dtype not in FLOATS:
            raise UserError(f"{where}: {local.name} has dtype {held.dtype}; supported: {', '.join(map(str, FLOATS))}")
