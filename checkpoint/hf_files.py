"""The tensors of a Hugging Face directory, whichever of the known arrangements it has; nothing is read before it is sliced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.block_fp8 import BlockQuantised
from checkpoint.hf_check import VALUE_HEAD, VALUE_HEAD_ALIASES, check, check_scale_values
from checkpoint.mapped import MappedFiles
from checkpoint.safetensors_format import Entry, read_header
from parallel.errors import UserError
from parallel.families import FAMILIES
from parallel.model_config import ModelConfig
from parallel.quantization import MODELOPT, BlockFP8, read_modelopt, read_quantization
from resharding.errors import listed
from resharding.fp8 import E4M3, SUFFIX
from resharding.layout import Layout, LocalTensor, parameters_of
from resharding.layouts import hf_layout

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNFINISHED = ("*.tmp", "*.incomplete", "*.part", "*.aria2", ".cache/huggingface/download/*.incomplete")
RESIDENT = 256 << 20  # bytes of the files that stay mapped in memory after they were handed out
# transformers 5 holds mixtral's block under the name that the other families use
ALIASES = ((".block_sparse_moe.", ".mlp."), *((VALUE_HEAD, other) for other in VALUE_HEAD_ALIASES))


class HFFiles(Mapping[str, Any]):
    """The tensors of a HF directory by the names in its files. A context manager.

    A value is a tensor over the mapped file (no copy; never write to it) or, of a block-quantised FP8 tensor, something that
    gives values when sliced: code x scale, in `fp8_values`. `layout(model)` says which canonical tensor sits where in which.
    Pages are given back as more tensors are taken, so resident memory is bounded by about the largest tensor + 256 MB.
    Raises UserError for a directory that does not exist, is half written, or is quantised in another way.
    """

    def __init__(self, directory: str | Path, fp8_values: torch.dtype = torch.float32) -> None:
        self.directory, self.fp8_values = Path(directory), fp8_values
        self.quantization = _read_quantization(self.directory)
        self.entries: dict[str, tuple[str, Entry]] = _find(self.directory)
        self.mapped = MappedFiles(self.directory)
        self._taken: list[tuple[str, Entry]] = []
        self._resident = 0
        self._codes = {name for name, (_, e) in self.entries.items() if e.dtype == E4M3}
        self._scales = {name + SUFFIX for name in self._codes}
        self._checked: set[str] = set()  # scales whose values were looked at

    def layout(self, model: ModelConfig, rank: int = 0) -> Layout:
        """The files' own layout: split, fused or transposed experts, each tensor in the dtype that it is stored in.

        What is missing is listed under its usual name: `check` says what is wrong.
        """
        expected = hf_layout(model, torch.bfloat16, rank, self._experts(model))
        return Layout("hf", rank, tuple(self._as_stored(local) for local in expected.tensors))

    def check(self, model: ModelConfig, without_mtp: bool = False) -> Layout:
        """The layout, where the files hold exactly the model. Raises UserError that names the tensors where they do not.

        `without_mtp` leaves layers for multi-token prediction out, with a warning; else they are refused by name.
        """
        return check(self, model, without_mtp)

    def _experts(self, model: ModelConfig) -> Any:
        fused = [p.fused.format(layer=layer) for p in parameters_of(model) if p.fused for layer in model.moe_layers]
        if not any(name in self.entries for name in fused):
            return "split"
        return "transposed" if FAMILIES[model.family].fused_experts == "transposed" else "fused"

    def _as_stored(self, local: LocalTensor) -> LocalTensor:
        name = local.name
        for usual, other in ALIASES:
            if name not in self.entries and name.replace(usual, other) in self.entries:
                name = name.replace(usual, other)
        dtype = self.entries[name][1].dtype if name in self.entries else None
        return LocalTensor(name, local.shape, dtype or local.dtype, local.pieces)

    def quantised(self, name: str) -> BlockQuantised | None:
        """Codes, scales and block size of an FP8 tensor; None for any other."""
        if name not in self._codes or self.quantization is None:
            return None
        return BlockQuantised(self.stored(name), self.stored(name + SUFFIX), self.quantization.block, self.fp8_values)

    def stored(self, name: str) -> Tensor:
        """The bytes of a tensor as they are in its file, also those of scales.

        Raises UserError that names the tensor for a dtype that torch has not, and for scales that are not finite or not above zero.
        """
        file, entry = self.entries[name]
        if entry.dtype is None:
            raise UserError(f"{self.directory / file}: {name} has dtype {entry.code}, which cannot be read")
        self._taken.append((file, entry))
        self._resident += entry.stop - entry.start
        if self._resident > RESIDENT:
            self.release(keep=1)
        data = self.mapped.bytes(file)[entry.start:entry.stop]
        if entry.start % entry.dtype.itemsize:  # some writers do not align
            data = data.clone()
        tensor = data.view(entry.dtype).view(entry.shape)
        if name in self._scales and name not in self._checked:
            check_scale_values(name, tensor, f"{self.directory / file}")
            self._checked.add(name)
        return tensor

    def release(self, keep: int = 0) -> None:
        """Give back the pages of all tensors taken so far but the last `keep`. Their values stay valid: they are mapped again."""
        done = self._taken[:len(self._taken) - keep]
        for file, entry in done:
            self.mapped.forget(file, entry.start, entry.stop)
        del self._taken[:len(done)]
        self._resident = sum(entry.stop - entry.start for _, entry in self._taken)

    def __getitem__(self, name: str) -> Any:
        return self.quantised(name) if name in self._codes else self.stored(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.entries if name not in self._scales)

    def __len__(self) -> int:
        return len(self.entries.keys() - self._scales)

    def __enter__(self) -> HFFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.mapped.close()
        self._taken.clear()


def _read_quantization(directory: Path) -> BlockFP8 | None:
    if not directory.is_dir():
        raise UserError(f"model directory {str(directory)!r} does not exist; give a directory with config.json and *.safetensors")
    config, modelopt = (_read_json(directory / name) for name in ("config.json", MODELOPT))
    found = read_quantization(config) if isinstance(config, dict) else None
    return found if modelopt is None else read_modelopt(modelopt, str(directory / MODELOPT))


def _read_json(path: Path) -> Any:
    """The content of a file of JSON, None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # also what is not UTF-8
        raise UserError(f"{path} is not valid JSON: {error}") from None


def _find(directory: Path) -> dict[str, tuple[str, Entry]]:
    """File and place of every tensor. Raises UserError that names what is missing, unfinished or contradictory."""
    where = f"model directory {str(directory)!r}"
    if unfinished := [p.name for pattern in UNFINISHED for p in sorted(directory.glob(pattern))]:
        raise UserError(f"{where} is not complete: it holds {listed(unfinished)}; finish the download, or delete these files")
    files = sorted(p.name for p in directory.glob("*.safetensors"))
    if (directory / INDEX).is_file():
        return _indexed(directory, where, files)
    if not files:
        raise UserError(f"{where} holds no *.safetensors file; weights in other formats are not read")
    if len(files) > 1 and SINGLE not in files:
        raise UserError(f"{where} holds {len(files)} safetensors files ({listed(files)}) and no {INDEX}; add the index")
    file = SINGLE if SINGLE in files else files[0]
    return {name: (file, entry) for name, entry in read_header(directory / file).items()}


def _indexed(directory: Path, where: str, files: list[str]) -> dict[str, tuple[str, Entry]]:
    index = _read_json(directory / INDEX)
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise UserError(f"{directory / INDEX} is not a safetensors index: it has no weight_map of tensors' names to files; download the directory again")
    weight_map: dict[str, str] = index["weight_map"]
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise UserError(f"{directory / INDEX}: weight_map says {file!r} of {name}; it must be the name of a safetensors file: download it again")
    named = sorted(set(weight_map.values()))
    if absent := [file for file in named if file not in files]:
        raise UserError(f"{where} lacks the shards {listed(absent)} that {INDEX} names; download them")
    if SINGLE in files and SINGLE not in named:
        raise UserError(f"{where} holds {SINGLE} beside {INDEX}, which does not name it; delete the one that is not the model's")
    held = {file: read_header(directory / file) for file in named}
    if missing := [f"{name} ({file})" for name, file in weight_map.items() if name not in held[file]]:
        raise UserError(f"{where}: shards lack {len(missing)} tensors that {INDEX} places in them: {listed(missing)}; download them again")
    if extra := [f"{name} ({file})" for file in named for name in held[file] if weight_map.get(name) != file]:
        raise UserError(f"{where}: shards hold {len(extra)} tensors that {INDEX} does not place in them: {listed(extra)}; "
                        "they are not of one model")
    return {name: (file, held[file][name]) for name, file in weight_map.items()}
