"""Checkpoint directories of Megatron-LM and Megatron-Bridge: where the weights are in them, which model it is, and the files we write ourselves.

    DIR/latest_checkpointed_iteration.txt     "123", or "release": which one is the newest whole checkpoint
    DIR/iter_0000123/ or DIR/release/         a `torch_dist` checkpoint; Megatron-LM's common.pt holds the arguments of the run
    Megatron-Bridge adds: DIR/latest_train_state.pt, and in iter_*: run_config.yaml, train_state.pt, tokenizer/

Sources: Megatron-LM `megatron/training/checkpointing.py`, Megatron-Bridge `training/checkpointing.py`, `utils/checkpoint_utils.py`, `state.py`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from checkpoint.hf_config import write_companions
from checkpoint.megatron_args import check_types, contradictions, fields_of, from_lm, lm_arguments, model_of
from checkpoint.safe_pickle import load_common
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import listed

TRACKER, TRAIN_STATE, RUN_CONFIG = "latest_checkpointed_iteration.txt", "train_state.pt", "run_config.yaml"
RELEASE, FIRST = "release", "iter_0000000"
TOKENIZER = "tokenizer"
_ITERATION = re.compile(r"iter_(\d{7,})|release")


@dataclass(frozen=True)
class Found:
    """A checkpoint of Megatron: `weights` is the torch_dist directory, `form` whose it is, `companions` where config and tokenizer are."""

    form: str
    weights: Path
    companions: Path | None


def find(directory: Path) -> Found | None:
    """The checkpoint that a directory of Megatron-LM or Megatron-Bridge stands for: its newest, or itself; None where it is neither.

    Raises UserError for one that was not written to its end, or in a format that is not read.
    """
    tracker, state = directory / TRACKER, directory / f"latest_{TRAIN_STATE}"
    if tracker.is_file():
        weights = directory / _named(tracker)
        if not weights.is_dir():
            raise UserError(f"{tracker} names {weights.name}, which is not in {str(directory)!r}; it holds {listed(_iterations(directory)) or 'none'}")
    elif state.is_file():
        weights = directory / f"iter_{int(load_common(state).get('step', -1)):07d}"
    elif (directory / ".metadata").is_file() or (directory / RUN_CONFIG).is_file() or (directory / "common.pt").is_file():
        weights = directory
    elif iterations := _iterations(directory):
        raise UserError(f"{str(directory)!r} holds {listed(iterations)} and no {TRACKER}, which is written last; give one of them")
    else:
        return None
    if legacy := sorted(p.name for p in weights.glob("mp_rank_*")):
        raise UserError(f"{weights} is in Megatron's `torch` format ({listed(legacy, 2)}), which is not read: save it again with --ckpt-format torch_dist")
    companions = next((c for c in (weights / "hf", weights / TOKENIZER, directory / "hf", directory / TOKENIZER) if c.is_dir()), None)
    return Found("megatron-bridge" if (weights / RUN_CONFIG).is_file() else "megatron-lm", weights, companions)


def _named(tracker: Path) -> str:
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{tracker} is not text ({error}); it must hold a number or 'release'") from None
    if text != RELEASE and not text.isdecimal():
        raise UserError(f"{tracker} holds {text!r}; it must be a number or 'release'")
    return text if text == RELEASE else f"iter_{int(text):07d}"


def _iterations(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.is_dir() and _ITERATION.fullmatch(p.name)) if directory.is_dir() else []


def read_model(found: Found, hf_config: Path | None) -> ModelConfig:
    """The architecture: from `hf_config` (or a config.json beside the tokenizer), else from what the checkpoint says of itself.

    Raises UserError where the two contradict each other, or neither says enough.
    """
    stored, where = _stored_fields(found)
    directory = _config_directory(found, hf_config)
    if directory is None:
        if stored is None:
            raise UserError(f"{found.weights} does not say which model it is ({where}); give the model's config.json with --hf-config DIR")
        return model_of(stored, where)
    if stored is not None:
        check_types(stored, where)
    divisor = (stored or {}).get("make_vocab_size_divisible_by")
    model = ModelConfig.from_directory(directory, **({"make_vocab_size_divisible_by": int(divisor)} if divisor else {}))
    if stored is not None and (wrong := contradictions(model, stored)):
        raise UserError(f"{directory / 'config.json'} is not of the model in {found.weights}: {'; '.join(wrong)}")
    return model


def described_in(found: Found, hf_config: Path | None) -> str:
    """The name of the file that `read_model` takes the model from."""
    if _config_directory(found, hf_config) is not None:
        return "config.json"
    return RUN_CONFIG if found.form == "megatron-bridge" else "common.pt"


def _config_directory(found: Found, hf_config: Path | None) -> Path | None:
    return hf_config or (found.companions if found.companions and (found.companions / "config.json").is_file() else None)


def _stored_fields(found: Found) -> tuple[dict[str, Any] | None, str]:
    """What a checkpoint says of its model, in the words of TransformerConfig, and where it says so."""
    if found.form == "megatron-bridge":
        path = found.weights / RUN_CONFIG
        try:
            section = yaml.load(path.read_text(), Loader=_Plain).get("model")  # noqa: S506 (tags become plain values)
        except (yaml.YAMLError, AttributeError, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        return (dict(section) if isinstance(section, dict) else None), f"the settings in {path}"
    arguments = load_common(found.weights / "common.pt").get("args")
    return (from_lm(vars(arguments)) if isinstance(arguments, argparse.Namespace) else None), f"the arguments in {found.weights / 'common.pt'}"


class _Plain(yaml.SafeLoader):
    """Reads tags of Python objects as the plain values below them."""


def _without_tag(loader: Any, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else loader.construct_scalar(node)


_Plain.add_multi_constructor("tag:yaml.org,2002:python/", _without_tag)


def weights_folder(form: str) -> str:
    """Where below DIR we write the weights. Without optimizer state Megatron-LM starts from a `release`, at iteration 0."""
    return {"mcore-rl": "weights", "megatron-lm": RELEASE, "megatron-bridge": FIRST}[form]


def common_state(form: str, model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """What common.pt holds beside the tensors."""
    if form == "mcore-rl":
        return {}
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    out: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}
    if form == "megatron-lm":
        out["args"] = argparse.Namespace(**lm_arguments(model, parallel.tp, parallel.pp, parallel.ep, parallel.etp))
    return out


def describe(directory: Path, form: str, model: ModelConfig, parallel: ParallelConfig, dtype: str, source: Path | None) -> None:
    """Rank 0: the files around the weights in a directory that is being written."""
    weights = directory / weights_folder(form)
    (weights / TOKENIZER).mkdir()
    write_companions(weights / TOKENIZER, model, dtype, source)
    (directory / TRACKER).write_text(RELEASE if form == "megatron-lm" else "0")
    if form == "megatron-bridge":
        state = {**{name: torch.tensor(0, dtype=torch.int64) for name in ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")},
                 "floating_point_operations_so_far": torch.tensor(0.0, dtype=torch.float64),
                 **{name: torch.tensor(False) for name in ("do_train", "do_valid", "do_test")}}
        for path in (weights / TRAIN_STATE, directory / f"latest_{TRAIN_STATE}"):
            torch.save(state, path)
        (weights / RUN_CONFIG).write_text(yaml.safe_dump(_run_config(model, parallel), sort_keys=False))


def _run_config(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    kind = "mla_provider.MLAModelProvider" if model.mla is not None else "gpt_provider.GPTModelProvider"
    section: Mapping[str, Any] = {
        "_target_": f"megatron.bridge.models.{kind}", "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        **{name: value for name, value in fields_of(model).items() if value is not None}, "should_pad_vocab": True,
        "tensor_model_parallel_size": parallel.tp, "pipeline_model_parallel_size": parallel.pp, "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp}
    tokenizer = {"_target_": "megatron.bridge.training.tokenizers.config.TokenizerConfig", "tokenizer_type": "HuggingFaceTokenizer"}
    return {"model": json.loads(json.dumps(section)), "tokenizer": tokenizer}


def is_ours(directory: Path) -> bool:
    """Whether a directory holds one converted model, and nothing of a run: only such a one may be overwritten."""
    known = {TRACKER, f"latest_{TRAIN_STATE}", "manifest.json"}
    held = {p.name for p in directory.iterdir()}
    folders = held - known
    return TRACKER in held and folders in ({RELEASE}, {FIRST})
