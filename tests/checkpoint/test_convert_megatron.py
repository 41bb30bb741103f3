"""What conversion writes is what Megatron-Core saves from a model that it really built, and what it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.convert import open_model, write_mcore
from checkpoint.torch_dist import TorchDistFiles
from parallel.config import ParallelConfig
from tests.checkpoint.built import load_models, save_models
from tests.models import FAMILY_TINY, write_model
from tests.worker_pool import run_ranks

FAMILIES = sorted(FAMILY_TINY)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: Any) -> dict[str, Path]:
    """A model directory of every family, in bfloat16, heads tied in some."""
    root = tmp_path_factory.mktemp("hf")
    return {f: write_model(root / f, f, dtype="bfloat16", num_hidden_layers=2, tie_word_embeddings=f in ("llama", "qwen3")) for f in FAMILIES}


@pytest.fixture(scope="module")
def converted(sources: dict[str, Path], tmp_path_factory: Any) -> dict[str, Path]:
    """Every model converted for TP2, PP2, EP2 by this one process."""
    root = tmp_path_factory.mktemp("converted")
    for family, source in sources.items():
        with open_model("hf", source) as opened:
            write_mcore(opened, root / family, ParallelConfig(tp=2, pp=2, ep=2 if opened.model.moe else 1, etp=1 if opened.model.moe else None))
    return {family: root / family for family in sources}


def contents(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype, bytes]]:
    with TorchDistFiles(directory) as files:
        return {key: (held.shape, held.dtype, held[tuple(slice(0, n) for n in held.shape)].reshape(-1).view(torch.uint8).numpy().tobytes())
                for key, held in files.items()}


def grid(directory: Path) -> dict[str, set[Any]]:
    with TorchDistFiles(directory) as files:
        return {key: {chunk.box for chunk in held.chunks} for key, held in files.items()}


def objects(directory: Path) -> set[str]:
    with TorchDistFiles(directory) as files:
        return set(files.metadata.state_dict_metadata) - set(files)


def test_every_family_is_stored_as_megatron_stores_it(sources: dict[str, Path], converted: dict[str, Path], tmp_path: Path) -> None:
    """Keys, global shapes, dtypes and bytes, against a save from two pipeline stages."""
    run_ranks(2, save_models, [(str(sources[f]), str(tmp_path / f)) for f in FAMILIES], {"pp": 2})
    for family in FAMILIES:
        want, have = contents(tmp_path / family / "weights"), contents(converted[family] / "weights")
        # TP2 pads the vocabulary further than TP1
        rows = {key: 203 * 64 * 2 for key in ("embedding.word_embeddings.weight", "output_layer.weight")}
        assert want.keys() == have.keys(), family
        for key in want:
            assert want[key][:2] == have[key][:2] or key in rows, (family, key)
            assert want[key][2][:rows.get(key)] == have[key][2][:rows.get(key)], (family, key)
        assert have["embedding.word_embeddings.weight"][0][0] == 256
        missing = objects(tmp_path / family / "weights") - objects(converted[family] / "weights")
        assert not missing, f"{family}: a loader of Megatron's asks for {sorted(missing)[:3]}"


def test_chunks_are_those_of_the_ranks(sources: dict[str, Path], tmp_path: Path) -> None:
    for family, parallel in (("qwen2", {"tp": 2}), ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True})):
        run_ranks(2, save_models, [(str(sources[family]), str(tmp_path / family))], parallel)
        with open_model("hf", sources[family]) as opened:
            write_mcore(opened, tmp_path / "ours" / family, ParallelConfig(**parallel))
        assert grid(tmp_path / family / "weights") == grid(tmp_path / "ours" / family / "weights"), family


def test_our_loader_reads_it_under_another_layout(sources: dict[str, Path], converted: dict[str, Path]) -> None:
    assert run_ranks(2, load_models, [(str(sources[f]), str(converted[f])) for f in FAMILIES], {"pp": 2}) == [[[]] * len(FAMILIES)] * 2
    some = ("llama", "qwen2", "deepseek_v3", "qwen2_moe")
    parallel = {"tp": 2, "etp": 1, "ep": 2, "sequence_parallel": True}
    for moe in (False, True):
        jobs = [(str(sources[f]), str(converted[f])) for f in some if ("moe" in f or "deepseek" in f) == moe]
        assert run_ranks(2, load_models, jobs, parallel if moe else {"tp": 2}) == [[[]] * 2] * 2


def test_megatrons_own_save_and_load(sources: dict[str, Path], converted: dict[str, Path], tmp_path: Path) -> None:
    """`dist_checkpointing.load` reads what we write; we read what `dist_checkpointing.save` writes."""
    some = ("qwen2", "qwen3_moe", "deepseek_v3")
    jobs = [(str(sources[f]), str(converted[f] / "weights")) for f in some]
    assert run_ranks(1, load_models, jobs, {}, native=True) == [[[]] * len(some)]
    run_ranks(1, save_models, [(str(sources["deepseek_v3"]), str(tmp_path / "native"))], {}, native=True)
    with open_model("mcore", tmp_path / "native", hf_config=sources["deepseek_v3"]) as native, open_model("hf", sources["deepseek_v3"]) as source:
        from checkpoint.convert import verify

        verify(source, native)
