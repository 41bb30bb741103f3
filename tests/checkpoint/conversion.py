"""Shortcuts of the conversion tests: convert in one call, look at what is stored, store tensors as torch itself does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from checkpoint.convert import open_model, write_hf, write_mcore
from parallel.config import ParallelConfig


def to_mcore(source: Path, destination: Path, parallel: ParallelConfig = ParallelConfig(), kind: str = "hf", **options: Any) -> None:
    with open_model(kind, source, options.pop("hf_config", None)) as opened:
        write_mcore(opened, destination, parallel, **options)


def to_hf(source: Path, destination: Path, **options: Any) -> None:
    with open_model("mcore", source, options.pop("hf_config", None), options.pop("without_mtp", False)) as opened:
        write_hf(opened, destination, **options)


def tensors(directory: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    out = {}
    for file in sorted(directory.glob("*.safetensors")):
        out.update({name: (t.dtype, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in load_file(file).items()})
    return out


def store(weights: Path, held: dict[str, torch.Tensor], common: dict[str, Any] | None = None) -> None:
    """`torch_dist` weights as torch itself writes them, in one chunk a key."""
    from torch.distributed import checkpoint as dcp

    weights.mkdir(parents=True)
    dcp.save(held, storage_writer=dcp.FileSystemWriter(str(weights)), no_dist=True)
    torch.save(common or {}, weights / "common.pt")
    (weights / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
