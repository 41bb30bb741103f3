"""Megatron's distributed checkpoint format, written in this process.

Every rank writes the shards it holds; a load cuts them anew, so a checkpoint does not depend on the layout that wrote it.
`dist_checkpointing.save` itself starts two helper processes a rank (3-4 s, and orphans after a SIGKILL), and raises some
errors on rank 0 only while the others wait. Here the same steps run one by one and each failure is told to all ranks; what
is written is the format that `dist_checkpointing.load` and Megatron-LM read (`torch_dist`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from checkpoint.files import sync_file
from checkpoint.together import catchable, gather, on_rank_zero, raise_together, rank
from parallel.errors import UserError
from parallel.training import TrainingModel

logger = logging.getLogger(__name__)
T = TypeVar("T")

OPTIMIZER_PREFIX = "optimizer."
# What the config of this run decides; the values in a checkpoint would silently win over it.
_CONFIG_OWNS = ("max_lr", "min_lr", "wd_mult", "lr_mult", "betas", "eps", "bias_correction")


def save_sharded(directory: Path, state: dict[str, Any]) -> None:
    """Collective: write `state` (Megatron sharded tensors; anything else is common and taken from rank 0) to `directory`.

    The directory is made if missing. Raises CheckpointError on every rank when any rank fails.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

    doing = f"writing {directory}"
    on_rank_zero(lambda: directory.mkdir(parents=True, exist_ok=True), doing)
    sharded, common = _everywhere(lambda: save_preprocess(state, validate_access_integrity=False), doing)
    everyone = determine_global_metadata(sharded)[1]
    on_rank_zero(lambda: validate_sharding_integrity(everyone), doing)
    on_rank_zero(lambda: _save_common(directory / "common.pt", common), doing)
    _everywhere(lambda: _save_shards(directory, sharded), doing)
    on_rank_zero(lambda: save_config(CheckpointingConfig("torch_dist", 1), str(directory)), doing)


def _everywhere(function: Callable[[], T], doing: str) -> T:
    """Every rank calls `function`; an error on one is raised on all."""
    result: Any = None
    error: BaseException | None = None
    try:
        result = function()
    except catchable() as caught:
        error = caught
    raise_together(error, doing)
    return result


def _save_common(path: Path, common: dict[str, Any]) -> None:
    torch.save(common, path)
    sync_file(path)


def _save_shards(directory: Path, sharded: dict[str, Any]) -> None:
    """The writing step of Megatron's TorchDistSaveShardedStrategy, without its writer processes."""
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )
    from torch.distributed import checkpoint as dcp

    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    dcp.save(mcore_to_pyt_state_dict(by_key, False),
             storage_writer=dcp.FileSystemWriter(str(directory), thread_count=1, sync_files=True, overwrite=True),
             planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False))


def load_sharded(directory: Path, state: dict[str, Any], ignore: str | None = None) -> dict[str, Any]:
    """Collective: the values of `state`'s sharded tensors, and the common part, read from `directory`.

    The checkpoint must hold exactly the tensors asked for, those whose key starts with `ignore` aside. Raises UserError for
    another model's checkpoint (names tensors and shapes), CheckpointError where reading fails; on every rank.
    """
    from megatron.core import dist_checkpointing

    doing = f"reading {directory}"
    on_rank_zero(lambda: _require_files(directory), doing)
    difference = _everywhere(lambda: _differences(directory, state, ignore), doing)
    missing = sorted({text for part in gather(difference[0]) for text in part})
    unwanted = sorted(set(difference[1]) - {key for part in gather(difference[2]) for key in part})
    if missing or unwanted:
        raise UserError(f"checkpoint {directory} is not of this model: " + "; ".join(
            [f"it lacks {_few(missing)}"] * bool(missing) + [f"it holds {_few(unwanted)}, which is not asked for"] * bool(unwanted))
            + _hint(missing + unwanted))
    return _everywhere(lambda: dist_checkpointing.load(state, str(directory), validate_access_integrity=False), doing)


def _require_files(directory: Path) -> None:
    for name in ("metadata.json", "common.pt", ".metadata"):
        if not (directory / name).is_file():
            raise UserError(f"{directory} is no distributed checkpoint: {name} is missing; give a directory that was written whole")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _hint(names: list[str]) -> str:
    if all(name.startswith(OPTIMIZER_PREFIX) for name in names):
        return "; optimizer.distributed must be what it was when the checkpoint was written"
    return "; resume with the model that wrote it"


def _differences(directory: Path, state: dict[str, Any], ignore: str | None) -> tuple[list[str], list[str], list[str]]:
    """(what this rank asks for and the files lack, keys in the files, keys this rank asks for)."""
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    stored = {item.key: item for item in load_sharded_metadata(str(directory)).values()}
    missing, asked = [], []
    for item in _sharded_items(state):
        asked.append(item.key)
        if item.key not in stored:
            missing.append(item.key)
            continue
        want, have = getattr(item, "global_shape", None), getattr(stored[item.key], "global_shape", None)
        # vocabulary rows are padded by layout: their number may differ; a factory's shape is known only once it is applied
        if hasattr(item, "local_shape") and not item.allow_shape_mismatch and want != have:
            missing.append(f"{item.key} of shape {list(want or ())} (it is {list(have or ())} there)")
    return missing, [key for key in stored if (ignore is None or not key.startswith(ignore)) and "_extra_state" not in key], asked


def _sharded_items(value: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory

    if isinstance(value, (ShardedBase, ShardedTensorFactory)):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _sharded_items(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _sharded_items(part)


def chunk_key(training: TrainingModel, index: int) -> str:
    """Megatron-LM's names: `model`, or `model0`, `model1`, ... for virtual pipeline chunks."""
    return "model" if len(training.modules) == 1 else f"model{index}"


def model_state(training: TrainingModel) -> dict[str, Any]:
    """Sharded tensors of all model chunks of this rank. Call inside `training.entered()`."""
    states = {chunk_key(training, i): module.sharded_state_dict(metadata=_metadata()) for i, module in enumerate(training.modules)}
    for state in states.values() if training.model.head == "value" else ():
        if "output_layer.weight" in state:  # Megatron takes it for a padded vocabulary: the first row of any head would be loaded
            state["output_layer.weight"].allow_shape_mismatch = False
    return states


def _metadata() -> dict[str, Any]:
    """Megatron writes into the dictionary it is given: a fresh one for every call.

    `mem_efficient` gathers optimizer state on one data-parallel rank over gloo instead of on all through the device: half the
    time measured on CPU, and no second copy of the state on every rank. Files of either kind are read alike.
    """
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
            "distrib_optim_fully_reshardable_mem_efficient": True}


def model_and_optimizer_state(training: TrainingModel, loading: bool) -> dict[str, Any]:
    """Collective: what `save_sharded` writes and `load_sharded` fills: model chunks, optimizer and schedule where there are any."""
    training.memory.require("optimizer")
    with training.entered():
        state = model_state(training)
        if training.optimizer is not None:
            _make_moments(training.optimizer)
            # its entries must be made from these very tensors: it finds its parameters among them
            state["optimizer"] = training.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=_metadata())
        if training.scheduler is not None and not loading:
            state["scheduler"] = training.scheduler.state_dict()
    return state


def _make_moments(optimizer: Any) -> None:
    """Zero moments where there has been no step yet: Megatron saves and fills only what exists."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        each.init_state_fn(each.optimizer, each.config)


def load_into(training: TrainingModel, state: dict[str, Any]) -> None:
    """Put what `load_sharded` returned into model, optimizer and schedule. Learning rates and betas stay those of this run."""
    load_model_state(training, state)
    if training.optimizer is None:
        return
    with training.entered(), torch.no_grad():
        own = [{name: group[name] for name in _CONFIG_OWNS if name in group} for group in training.optimizer.param_groups]
        training.optimizer.load_state_dict(state["optimizer"])
        _keep_config(training.optimizer.param_groups, own)
        if training.scheduler is not None:
            training.scheduler.num_steps = 0  # its load_state_dict adds the stored count to the present one
            training.scheduler.load_state_dict(state["scheduler"])


def _keep_config(groups: Any, own: list[dict[str, Any]]) -> None:
    for group, values in zip(groups, own, strict=True):
        changed = {name: (group.get(name), value) for name, value in values.items() if group.get(name) != value}
        if changed and rank() == 0:
            logger.warning("optimizer settings differ from the checkpoint's; this run's are used: %s",
                           ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items()))
        group.update(values)


def load_model_state(training: TrainingModel, state: dict[str, Any]) -> None:
    """Put loaded weights into the model chunks. Raises UserError where a parameter got none."""
    with training.entered(), torch.no_grad():
        for i, module in enumerate(training.modules):
            result = module.load_state_dict(state[chunk_key(training, i)], strict=False)
            absent = [name for name in result.missing_keys if not name.endswith("_extra_state")]
            if absent:
                raise UserError(f"the checkpoint gives no values for {_few(absent)}; resume with the model that wrote it")


def save_training(directory: Path, training: TrainingModel) -> None:
    """Collective: model, optimizer and schedule of one role into `directory`."""
    state = _everywhere(lambda: model_and_optimizer_state(training, loading=False), f"collecting the state for {directory}")
    save_sharded(directory, state)


def load_training(directory: Path, training: TrainingModel) -> None:
    """Collective: the reverse of `save_training`, under any layout."""
    state = _everywhere(lambda: model_and_optimizer_state(training, loading=True), f"preparing to read {directory}")
    state = load_sharded(directory, state)
    _everywhere(lambda: load_into(training, state), f"loading {directory}")
