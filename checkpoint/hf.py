"""Hugging Face directories and layouts in memory: a plan between the `hf` layout of the files and the layout at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from checkpoint.hf_check import EMBEDDING
from checkpoint.hf_export import export_hf
from checkpoint.hf_files import INDEX, SINGLE, HFFiles
from checkpoint.hf_writer import HFWriter, check_writable
from parallel.model_config import ModelConfig
from resharding.errors import WeightsError, listed
from resharding.layout import Layout, LocalTensor, canonical_blocks, canonical_shapes, check_tensors
from resharding.layouts import hf_layout
from resharding.plan import make_plan
from resharding.transport import in_place

__all__ = ["INDEX", "SINGLE", "HFFiles", "HFWriter", "check_writable", "export_hf", "read_hf", "write_hf"]


def read_hf(directory: str | Path, layout: Layout, tensors: Mapping[str, torch.Tensor], model: ModelConfig, without_mtp: bool = False) -> None:
    """Fill the local `tensors` of `layout` from a HF directory, reading only the slices they need, cast to their dtype.

    Directories with experts split or fused, and in block FP8 (dequantised on the way), are read. Raises UserError that names the
    tensors where the directory lacks one, holds one of another shape or dtype kind, or holds one that the model does not know:
    see `HFFiles.check`. A tied model whose files carry an `lm_head.weight` uses the embedding, as its config says.
    """
    check_tensors(layout, tensors)
    with HFFiles(directory) as files:
        held = files.check(model, without_mtp)
        plan = make_plan([held], [layout], canonical_blocks(model), source_is_everywhere=True, read_all=False)
        in_place.execute(plan, files, tensors, layout.rank)


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
