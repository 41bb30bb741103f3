"""The `mcore` layout is what Megatron-Core itself builds: same names and shapes, and a HF directory fills them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from checkpoint.hf import read_hf
from parallel.config import ParallelConfig
from parallel.device import prepare_megatron, select_device
from parallel.model_config import ModelConfig
from parallel.training import build
from resharding.layout import check_tensors
from resharding.layouts import mcore_layout
from tests.models import write_model
from tests.resharding.direct import assert_same, mcore_shard
from tests.worker_pool import run_ranks


def fill(directories: list[Path], parallel: ParallelConfig) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = select_device("cpu")
    prepare_megatron(device)
    for directory in directories:
        model = ModelConfig.from_directory(directory)
        tensors = build(model, parallel, "float32", device, rank, world, seed=0).tensors
        layout = mcore_layout(model, parallel, rank, world, torch.float32)
        assert sorted(tensors) == sorted(layout.by_name)
        check_tensors(layout, tensors)
        read_hf(directory, layout, tensors, model)
        full = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
        assert_same(tensors, mcore_shard(full, model, parallel, rank, world))


@pytest.mark.parametrize("world, parallel", [(2, ParallelConfig(tp=2)), (2, ParallelConfig(pp=2, vpp=2)), (4, ParallelConfig(tp=2, pp=2)),
                                             (4, ParallelConfig(tp=4))])
def test_the_layout_names_and_shapes_are_megatrons(tmp_path: Path, world: int, parallel: ParallelConfig) -> None:
    directories = [write_model(tmp_path / family, family, tie_word_embeddings=tied) for family, tied in (("llama", True), ("qwen2", False))]
    run_ranks(world, fill, directories, parallel)
