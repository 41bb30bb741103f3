"""The `mcore` layout is what Megatron-Core itself builds: same names and shapes, and a HF directory fills them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from tests.models import FAMILY_TINY, write_model
from tests.resharding.direct import assert_same, mcore_shard
from tests.worker_pool import run_ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(root / family, family) for family in FAMILY_TINY}


def fill(directories: list[Path], parallel: ParallelConfig, counts: list[int] | None = None) -> None:
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
        assert_same(tensors, mcore_shard(canonical(directory, model), model, parallel, rank, world, counts=counts))


def canonical(directory: Path, model: ModelConfig) -> dict[str, torch.Tensor]:
    """The tensors of a directory, gpt_oss's experts taken apart by hand: [experts, in, out], gate and up columns taking turns."""
    full = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    for name in [name for name in full if ".mlp.experts." in name and model.family == "gpt_oss"]:
        fused, (block, kind) = full.pop(name), name.rsplit(".", 1)
        tail = "bias" if kind.endswith("_bias") else "weight"
        for e, one in enumerate(fused):
            rows = one if tail == "bias" else one.T
            parts = {"gate": rows[0::2], "up": rows[1::2]} if kind.startswith("gate_up") else {"down": rows}
            full.update({f"{block}.{e}.{x}_proj.{tail}": part.contiguous() for x, part in parts.items()})
    return full


@pytest.mark.parametrize("world, parallel", [(2, ParallelConfig(tp=2)), (2, ParallelConfig(pp=2, vpp=2)), (4, ParallelConfig(tp=2, pp=2)),
                                             (4, ParallelConfig(tp=4))])
def test_the_layout_names_and_shapes_are_megatrons(tmp_path: Path, world: int, parallel: ParallelConfig) -> None:
    directories = [write_model(tmp_path / family, family, tie_word_embeddings=tied) for family, tied in (("llama", True), ("qwen2", False))]
    run_ranks(world, fill, directories, parallel)


EXPERTS = [family for family, sizes in FAMILY_TINY.items() if "num_experts_per_tok" in sizes]
CUT = dict(tp=2, sequence_parallel=True)


@pytest.mark.parametrize("world, parallel, counts, families", [
    (1, {}, None, list(FAMILY_TINY)), (2, dict(CUT, etp=1), None, list(FAMILY_TINY)), (2, dict(ep=2), None, EXPERTS),
    (2, dict(CUT, ep=2, etp=1), None, EXPERTS), (2, dict(pp=2, first_stage_layers=1), [1, 3], list(FAMILY_TINY)),
    (2, dict(pp=2, vpp=2, pipeline_layout="Et|t|tt|L"), [1, 1, 2, 0], ["llama", "qwen2_moe", "deepseek_v3", "gpt_oss"]),
    pytest.param(4, dict(CUT, ep=2, etp=2), None, [f for f in EXPERTS if f != "gpt_oss"], marks=pytest.mark.slow),
    pytest.param(4, dict(CUT, pp=2, ep=2, etp=1), None, EXPERTS, marks=pytest.mark.slow)], ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_the_layout_of_every_family_is_megatrons(models: dict[str, Path], world: int, parallel: dict[str, Any], counts: list[int] | None,
                                                 families: list[str]) -> None:
    """`counts` are the decoder layers of every stage, chunk by chunk."""
    run_ranks(world, fill, [models[family] for family in families], ParallelConfig(**parallel), counts)
