"""Hugging Face directories and layouts in memory: a plan between the `hf` layout of the files and the layout at hand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoint.hf_check import EMBEDDING
from checkpoint.hf_export import export_hf
from checkpoint.hf_files import INDEX, SINGLE, HFFiles
from checkpoint.hf_writer import HFWriter, check_writable
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import WeightsError, listed
from resharding.fp8 import E4M3
from resharding.layout import Layout, LocalTensor, canonical_blocks, canonical_shapes, check_tensors
from resharding.layouts import hf_layout
from resharding.layouts.fp8 import fp8_blocks, fp8_layout
from resharding.plan import Blocks, make_plan
from resharding.transport import in_place

__all__ = ["INDEX", "SINGLE", "HFFiles", "HFWriter", "check_writable", "export_hf", "read_hf", "write_hf"]


def read_hf(directory: str | Path, layout: Layout, tensors: Mapping[str, torch.Tensor], model: ModelConfig, without_mtp: bool = False) -> None:
    """Fill the local `tensors` of `layout` from a HF directory, reading only the slices they need, cast to their dtype.

    Directories with experts split or fused, and in block FP8, are read: FP8 is dequantised on the way, but where the layout asks for
    e4m3 (`layouts.fp8.fp8_layout`) codes and scales are taken as they are. Raises UserError that names the tensors where the
    directory lacks one, holds one of another shape or dtype kind, or holds one that the model does not know: see `HFFiles.check`.
    A tied model whose files carry an `lm_head.weight` uses the embedding, as its config says.
    """
    check_tensors(layout, tensors)
    narrow = all(local.dtype == torch.bfloat16 for local in layout.tensors if len(local.shape) > 1)
    with HFFiles(directory, torch.bfloat16 if narrow else torch.float32) as files:
        held, blocks, source = files.check(model, without_mtp), canonical_blocks(model), files
        if codes := {p.canonical for local in layout.tensors if local.dtype == E4M3 for p in local.pieces if p.canonical in canonical_shapes(model)}:
            held, blocks, source = _as_stored(files, held, blocks, codes)
        plan = make_plan([held], [layout], blocks, source_is_everywhere=True, read_all=False)
        in_place.execute(plan, source, tensors, layout.rank)


def _as_stored(files: HFFiles, held: Layout, blocks: Blocks, codes: Collection[str | None]) -> tuple[Layout, Blocks, Mapping[str, Any]]:
    """Layout, canonical tensors and values of files of which `codes` are taken as e4m3 codes, with their scales."""
    raw = [local for local in held.tensors if any(piece.canonical in codes for piece in local.pieces)]
    if other := [local.name for local in raw if local.dtype != E4M3 or not codes >= {piece.canonical for piece in local.pieces}]:
        raise UserError(f"model directory {str(files.directory)!r} does not hold {listed(other)} in FP8 as a whole; the layout asks for its codes")
    assert files.quantization is not None
    weights = {name: shape for block in blocks for name, shape in block.items() if name in codes}
    stored = fp8_layout(replace(held, tensors=tuple(raw)), weights, files.quantization.block)
    rest = tuple(local for local in held.tensors if local not in raw)
    return (replace(held, tensors=stored.tensors + rest), fp8_blocks(blocks, weights, files.quantization.block),
            _Stored(files, frozenset(local.name for local in stored.tensors)))


class _Stored(Mapping[str, Any]):
    """The values of files, some of them as they are stored."""

    def __init__(self, files: HFFiles, names: frozenset[str]) -> None:
        self.files, self.names = files, names

    def __getitem__(self, name: str) -> Any:
        return self.files.stored(name) if name in self.names else self.files[name]

    def __iter__(self) -> Iterator[str]:
        return iter({*self.files, *self.names})

    def __len__(self) -> int:
        return len({*self.files, *self.names})


def write_hf(directory: str | Path, tensors: Mapping[str, torch.Tensor], model: ModelConfig, source: str | Path | None = None,
             shard_bytes: int = 5 << 30, overwrite: bool = False) -> None:
    """Write canonical `tensors` (name to full tensor) as a HF directory that transformers loads, in the embedding's dtype.

    Weights go to `model.safetensors`, or to shards of at most `shard_bytes` with an index. `source` is a directory to copy
    tokenizer and generation files from. Written to a sibling and renamed: the directory is whole or absent. Raises UserError
    where it exists and is not empty (unless `overwrite`), WeightsError where tensors are missing, unknown or misshapen.
    """
    check_writable(directory, overwrite)
    shapes = canonical_shapes(model)
    if wrong := sorted(set(shapes) ^ set(tensors)):
        raise WeightsError(f"cannot write {str(directory)!r}: missing or unknown tensors {listed(wrong)}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightsError(f"cannot write {str(directory)!r}: {name} has shape {tuple(tensors[name].shape)}, the model has {shape}")
    dtype = tensors[EMBEDDING].dtype
    layout = hf_layout(model, dtype)
    with HFWriter(directory, layout, model, dtype, source, shard_bytes, overwrite) as writer:
        for local in layout.tensors:
            writer.write(local.name, _assemble(local, tensors))


def _assemble(local: LocalTensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A file's tensor from the canonical tensors in it."""
    if [piece.canonical for piece in local.pieces] == [local.name]:
        return tensors[local.name].to(local.dtype)
    out = torch.empty(local.shape, dtype=local.dtype)
    for piece in local.pieces:
        piece.of(out).copy_(tensors[piece.canonical or ""])
    return out
