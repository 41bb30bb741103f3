"""HF directories: what is read is what the files hold, what is written is what was read, and transformers loads it."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint.hf import SINGLE, HFFiles, export_hf, read_hf
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import SyncError, WeightsError
from resharding.layout import Layout, canonical_shapes, empty_tensors
from resharding.layouts import hf_layout, mcore_layout, mcore_party
from tests.models import write_model
from tests.resharding.direct import assert_same, mcore_shard
from tests.worker_pool import run_ranks

GRID = [ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(tp=2, pp=2), ParallelConfig(tp=4),
        ParallelConfig(pp=2, vpp=2)]


def files_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def change(directory: Path, remove: str | None = None, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> None:
    """Edit the weights (`a__b` stands for `a.b`) and the config of a directory in place."""
    held = files_of(directory)
    held.pop(remove or "", None)
    held.update({name.replace("__", "."): t for name, t in tensors.items()})
    save_file(held, directory / SINGLE, metadata={"format": "pt"})
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**data, **(config or {})}))


def read(directory: Path, parallel: ParallelConfig = ParallelConfig(), dtype: torch.dtype = torch.float32,
         **options: Any) -> list[dict[str, torch.Tensor]]:
    model = ModelConfig.from_directory(directory)
    world = parallel.tp * parallel.pp
    out = []
    for rank in range(world):
        layout = mcore_layout(model, parallel, rank, world, dtype, **options)
        out.append({name: t.fill_(float("nan")) for name, t in empty_tensors(layout).items()})
        read_hf(directory, layout, out[-1], model)
    return out


@pytest.mark.parametrize("family, tied", [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True)])
def test_every_megatron_rank_reads_exactly_its_shard(tmp_path: Path, family: str, tied: bool) -> None:
    write_model(tmp_path, family, tie_word_embeddings=tied)
    model, full = ModelConfig.from_directory(tmp_path), files_of(tmp_path)
    assert set(full) == set(canonical_shapes(model))
    for parallel in GRID:
        for rank, tensors in enumerate(read(tmp_path, parallel)):
            assert_same(tensors, mcore_shard(full, model, parallel, rank, parallel.tp * parallel.pp))


def export(directory: Path, out: str, parallel: ParallelConfig, dtype: torch.dtype, damage: str | None = None,
           overwrite: bool = False) -> str | None:
    """Read a directory into this rank's Megatron shard and export it again; the text of the error, if any."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = ModelConfig.from_directory(directory)
    layouts = [mcore_layout(model, parallel, r, world, dtype) for r in range(world)]
    tensors = empty_tensors(layouts[rank])
    read_hf(directory, layouts[rank], tensors, model)
    if damage and rank == world - 1:
        tensors[damage].view(-1)[0] += 1.0
    try:
        export_hf(out, layouts, tensors, model, dtype, source=directory, rank=rank, overwrite=overwrite)
    except (UserError, WeightsError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("world, parallel", [(2, ParallelConfig(tp=2)), (2, ParallelConfig(pp=2)), (4, ParallelConfig(tp=2, pp=2)),
                                             (4, ParallelConfig(pp=2, vpp=2)), (2, ParallelConfig())])
def test_hf_to_megatron_to_hf_gives_back_the_same_bytes(tmp_path: Path, world: int, parallel: ParallelConfig) -> None:
    for family, tied, dtype in (("llama", True, torch.bfloat16), ("qwen2", False, torch.float32)):
        source, out = tmp_path / family, tmp_path / f"{family}-out"
        write_model(source, family, dtype=str(dtype).removeprefix("torch."), tie_word_embeddings=tied, vocab_size=205)
        assert run_ranks(world, export, source, str(out), parallel, dtype) == [None] * world
        assert_same(files_of(out), files_of(source))
        assert ModelConfig.from_directory(out) == ModelConfig.from_directory(source)
        a, b = (AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32) for d in (source, out))
        ids = torch.tensor([[5, 6, 7, 8]])
        with torch.no_grad():
            assert torch.equal(a(ids).logits, b(ids).logits)


def test_an_export_refuses_tied_copies_that_differ_and_writes_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "in", "qwen2", tie_word_embeddings=True)
    errors = run_ranks(2, export, tmp_path / "in", str(tmp_path / "out"), ParallelConfig(pp=2), torch.float32, damage="output_layer.weight")
    expected = "WeightsError: model.embed_tokens.weight: the copies in embedding.word_embeddings.weight on rank 0"
    assert all(e.startswith(expected) for e in errors)
    assert os.listdir(tmp_path) == ["in"]


def test_an_export_replaces_a_model_where_allowed_and_never_anything_else(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    for overwrite, words in ((False, "is not empty"), (True, "precious.txt")):
        errors = run_ranks(2, export, tmp_path / "in", str(out), ParallelConfig(tp=2), torch.float32, overwrite=overwrite)
        assert all(e.startswith("UserError") and words in e for e in errors) and os.listdir(out) == ["precious.txt"]
    (out / "precious.txt").rename(out / "config.json")
    assert run_ranks(2, export, tmp_path / "in", str(out), ParallelConfig(tp=2), torch.float32, overwrite=True) == [None, None]
    assert_same(files_of(out), files_of(tmp_path / "in"))
    assert sorted(os.listdir(tmp_path)) == ["in", "out"] and (out / "config.json").read_text() != "mine"


FAMILY_GRID = [("mistral", dict(pp=2, first_stage_layers=1)), ("qwen3", dict(tp=2, pp=2)), ("qwen2_moe", dict(tp=2, ep=2)),
               ("qwen3_moe", dict(pp=2, vpp=2, ep=2)), ("mixtral", dict(tp=2, ep=4, etp=1)), ("deepseek_v2", dict(pp=2, ep=2)),
               ("deepseek_v3", dict(tp=2, pp=2)), ("glm4_moe", dict(tp=2, ep=2, etp=2)), ("gpt_oss", dict(ep=4)), ("gpt_oss", dict(tp=2, pp=2))]


def export_all(directory: str, bucket_bytes: int) -> list[int]:
    """Every family of FAMILY_GRID through the party of four ranks and back; the most bytes of the file's tensors held at once."""
    rank, held = dist.get_rank(), []

    def counting(layout: Layout, device: Any) -> dict[str, torch.Tensor]:
        held.append(layout.nbytes)
        return empty_tensors(layout, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("checkpoint.hf_export.empty_tensors", counting)
        for number, (family, sizes) in enumerate(FAMILY_GRID):
            source = Path(directory, str(number))
            model = ModelConfig.from_directory(source)
            party = mcore_party(model, ParallelConfig(**sizes), 4, torch.bfloat16)
            tensors = empty_tensors(party.layout(rank))
            read_hf(source, party.layout(rank), tensors, model)
            export_hf(Path(directory, f"{number}-out"), party, tensors, model, torch.bfloat16, rank=rank, bucket_bytes=bucket_bytes)
    return held


def test_every_family_goes_through_megatron_ranks_and_back_in_small_buckets(tmp_path: Path) -> None:
    for number, (family, _) in enumerate(FAMILY_GRID):
        write_model(tmp_path / str(number), family, dtype="bfloat16")
    bucket = 1 << 14
    held = run_ranks(4, export_all, str(tmp_path), bucket)
    assert all(0 < max(mine) <= max(bucket, 2 * 64 * 96 * 2) for mine in held)  # or one expert of gpt_oss, gate and up
    assert min(len(mine) for mine in held) > len(FAMILY_GRID)  # several rounds each
    for number, (family, _) in enumerate(FAMILY_GRID):
        assert_same(files_of(tmp_path / f"{number}-out"), files_of(tmp_path / str(number)))


def broken_export(directory: str, fault: str) -> str:
    """Export with a fault on the last rank; the error. No rank may wait for ever, none may publish."""
    from resharding.transport import execute

    rank = dist.get_rank()
    model = ModelConfig.from_directory(Path(directory, "in"))
    party = mcore_party(model, ParallelConfig(tp=2), 2, torch.float32)
    tensors = empty_tensors(party.layout(rank))
    read_hf(Path(directory, "in"), party.layout(rank), tensors, model)

    def corrupting(plan: Any, source: Any, destination: dict[str, torch.Tensor], *rest: Any) -> Any:
        report = execute(plan, source, destination, *rest)
        for name, tensor in destination.items():
            if name.startswith("model.layers.2.self_attn.o_proj.weight"):
                tensor.view(-1)[0] += 1
        return report

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("checkpoint.hf_export.execute", corrupting) if fault == "bytes" else patch.setattr("checkpoint.hf_writer._write_at", full)
        try:
            export_hf(Path(directory, "out"), party, tensors, model, torch.float32, rank=rank, bucket_bytes=1 << 12)
        except (WeightsError, SyncError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("fault, words", [("bytes", "WeightsError: .*model.layers.2.self_attn.o_proj.weight: checksum"),
                                          ("disk", "SyncError: .*OSError: no space left on device .rank 1.")])
def test_an_export_that_goes_wrong_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path, fault: str, words: str) -> None:
    write_model(tmp_path / "in")
    errors = run_ranks(2, broken_export, str(tmp_path), fault)
    assert all(re.match(words, error) for error in errors), errors
    assert os.listdir(tmp_path) == ["in"]


def test_padding_rows_are_not_exported(tmp_path: Path) -> None:
    write_model(tmp_path / "in", num_key_value_heads=4, vocab_size=203)
    padded = ModelConfig.from_directory(tmp_path / "in", make_vocab_size_divisible_by=8)
    assert padded.padded_vocab_size(4) == 224 and padded.padded_vocab_size(2) == padded.padded_vocab_size(1) == 208
    assert mcore_layout(padded, ParallelConfig(tp=4), 3, 4, torch.float32)["embedding.word_embeddings.weight"].shape == (56, 64)
    run_ranks(4, export, tmp_path / "in", str(tmp_path / "out"), ParallelConfig(tp=4), torch.float32)
    found = files_of(tmp_path / "out")
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (203, 64)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 203


def test_values_are_cast_to_the_local_dtype(tmp_path: Path) -> None:
    write_model(tmp_path)
    model, full = ModelConfig.from_directory(tmp_path), files_of(tmp_path)
    layout = hf_layout(model, torch.bfloat16)
    tensors = empty_tensors(layout)
    read_hf(tmp_path, layout, tensors, model)
    assert_same(tensors, {name: t.bfloat16() for name, t in full.items()})


def test_only_the_slices_of_the_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    read_elements = 0
    original = HFFiles.__getitem__

    class Counting:
        def __init__(self, part: Any) -> None:
            self.part = part

        def __getattr__(self, name: str) -> Any:
            return getattr(self.part, name)

        def __getitem__(self, key: Any) -> torch.Tensor:
            nonlocal read_elements
            out = self.part[key]
            read_elements += out.numel()
            return out

    monkeypatch.setattr(HFFiles, "__getitem__", lambda self, name: Counting(original(self, name)))
    model = ModelConfig.from_directory(tmp_path)
    layout = mcore_layout(model, ParallelConfig(tp=2, pp=2), 1, 4, torch.float32)
    read_hf(tmp_path, layout, empty_tensors(layout), model)
    held = mcore_shard(files_of(tmp_path), model, ParallelConfig(tp=2, pp=2), 1, 4)
    assert 0 < read_elements <= sum(t.numel() for t in held.values())


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_reads_its_backbone_and_asks_for_no_head(tmp_path: Path, tied: bool) -> None:
    write_model(tmp_path, "qwen2", tie_word_embeddings=tied)
    parallel = ParallelConfig(pp=2)
    model, full = ModelConfig.from_directory(tmp_path), files_of(tmp_path)
    assert ("lm_head.weight" in full) != tied
    for rank, tensors in enumerate(read(tmp_path, parallel, head=False)):
        held = mcore_shard(full, model, parallel, rank, 2)
        held.pop("output_layer.weight", None)
        assert_same(tensors, held)


def test_an_untied_model_without_a_head_is_an_error_that_names_it(tmp_path: Path) -> None:
    change(write_model(tmp_path, "qwen2", tie_word_embeddings=True), config={"tie_word_embeddings": False})
    with pytest.raises(UserError, match=r"lm_head\.weight; config.json says tie_word_embeddings false"):
        read(tmp_path)


def test_a_tied_model_with_a_head_of_its_own_uses_the_embedding_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "qwen2", tie_word_embeddings=True)
    embedding = files_of(tmp_path)["model.embed_tokens.weight"]
    for row, warned in ((None, False), (3, True)):
        head = embedding.clone()
        if row is not None:
            head[row] += 1
        change(tmp_path, lm_head__weight=head)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            last = read(tmp_path, ParallelConfig(pp=2))[1]
        assert torch.equal(last["output_layer.weight"][:203], embedding)
        assert any("lm_head.weight differs" in r.getMessage() for r in caplog.records) == warned


def test_missing_extra_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    cases = [
        (dict(remove=name), rf"lacks 1 tensors of its config \(qwen2\): {name}"),
        ({"model__layers__0__self_attn__o_proj__bias": torch.zeros(64)}, "does not have: model.layers.0.self_attn.o_proj.bias"),
        ({name.replace(".", "__"): torch.zeros(16)}, rf"{name} has shape \(16,\), config.json asks for \(32,\)"),
        ({name.replace(".", "__"): torch.zeros(32, dtype=torch.int8)}, f"{name} has dtype I8; supported: F64, F32, F16, BF16"),
        (dict(config={"num_hidden_layers": 3}), "does not have: model.layers.3"),
    ]
    for number, (changes, message) in enumerate(cases):
        directory = write_model(tmp_path / str(number), "qwen2")
        change(directory, **changes)
        with pytest.raises(UserError, match=message):
            read(directory)
    harmless = write_model(tmp_path / "harmless", "llama")
    change(harmless, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    read(harmless)


def test_directories_without_weights_and_damaged_files_are_user_errors(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    (directory / SINGLE).write_bytes(b"not safetensors at all")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        read(directory)
    (directory / SINGLE).unlink()
    with pytest.raises(UserError, match=r"holds no \*.safetensors file"):
        read(directory)


def test_the_real_small_llama_survives_the_round_trip(tmp_path: Path, stories260k: Path | None) -> None:
    source = stories260k or write_model(tmp_path / "in", tie_word_embeddings=True)
    assert run_ranks(2, export, source, str(tmp_path / "out"), ParallelConfig(tp=2), torch.float32) == [None, None]
    assert_same({n: t for n, t in files_of(tmp_path / "out").items()}, {n: t for n, t in files_of(source).items() if n != "lm_head.weight"})
