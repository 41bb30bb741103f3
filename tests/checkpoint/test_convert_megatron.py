"""What conversion writes is what Megatron-Core saves from a model that it really built, and what it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.convert import open_model, verify, write_mcore
from checkpoint.torch_dist import TorchDistFiles
from parallel.config import ParallelConfig
from tests.checkpoint.built import megatrons_load, megatrons_save, save_and_load
from tests.models import FAMILY_TINY
from tests.worker_pool import run_ranks

FAMILIES = sorted(FAMILY_TINY)


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


@pytest.fixture(scope="module")
def built(sources: dict[str, Path], converted: dict[str, Path], tmp_path_factory: Any) -> tuple[Path, dict[str, list[list[str]]]]:
    """Megatron's models on two pipeline stages: where they were saved, and what reading our checkpoint gave them otherwise, by rank."""
    root: Path = tmp_path_factory.mktemp("built")
    wrong = run_ranks(2, save_and_load, [(str(sources[f]), str(root / f), str(converted[f])) for f in FAMILIES], {"pp": 2})
    return root, {family: [rank[i] for rank in wrong] for i, family in enumerate(FAMILIES)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_stored_as_megatron_stores_it(family: str, converted: dict[str, Path], built: tuple[Path, Any]) -> None:
    """Keys, global shapes, dtypes and bytes, against a save from two pipeline stages."""
    saved = built[0] / family / "weights"
    want, have = contents(saved), contents(converted[family] / "weights")
    padded = {key: 203 * 64 * 2 for key in ("embedding.word_embeddings.weight", "output_layer.weight")}  # further for TP2 than for TP1
    assert want.keys() == have.keys()
    for key in want:
        assert want[key][:2] == have[key][:2] or key in padded, key
        assert want[key][2][:padded.get(key)] == have[key][2][:padded.get(key)], key
    assert have["embedding.word_embeddings.weight"][0][0] == 256
    missing = objects(saved) - objects(converted[family] / "weights")
    assert not missing, f"a loader of Megatron's asks for {sorted(missing)[:3]}"


def test_our_loader_reads_it_under_other_layouts(sources: dict[str, Path], converted: dict[str, Path], built: tuple[Path, Any]) -> None:
    assert built[1] == {family: [[], []] for family in FAMILIES}
    for some, parallel in ((("llama", "qwen2"), {"tp": 2}), (("deepseek_v3", "qwen2_moe"), {"tp": 2, "etp": 1, "ep": 2, "sequence_parallel": True})):
        assert run_ranks(2, save_and_load, [(str(sources[f]), "", str(converted[f])) for f in some], parallel) == [[[], []]] * 2


def test_chunks_are_those_of_the_ranks(sources: dict[str, Path], tmp_path: Path) -> None:
    for family, parallel in (("qwen2", {"tp": 2}), ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True})):
        with open_model("hf", sources[family]) as opened:
            write_mcore(opened, tmp_path / "ours" / family, ParallelConfig(**parallel))
        run_ranks(2, save_and_load, [(str(sources[family]), str(tmp_path / family), str(tmp_path / "ours" / family))], parallel)
        assert grid(tmp_path / family / "weights") == grid(tmp_path / "ours" / family / "weights"), family


def test_megatrons_own_save_and_load(sources: dict[str, Path], converted: dict[str, Path], tmp_path: Path) -> None:
    """`dist_checkpointing.load` reads what we write; we read what `dist_checkpointing.save` writes."""
    some = ("qwen2", "qwen3_moe", "deepseek_v3")
    assert run_ranks(1, megatrons_load, [(str(sources[f]), str(converted[f] / "weights")) for f in some]) == [[[]] * len(some)]
    run_ranks(1, megatrons_save, [(str(sources["deepseek_v3"]), str(tmp_path / "native"))])
    with open_model("mcore", tmp_path / "native", hf_config=sources["deepseek_v3"]) as native, open_model("hf", sources["deepseek_v3"]) as source:
        verify(source, native)
