"""HF directories: what is read is what the files hold, what is written is what was read, and transformers loads it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.hf import INDEX, SINGLE, HFFiles, export_hf, read_hf, write_hf
from checkpoint.hf_config import hf_config
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import WeightsError
from resharding.layout import canonical_shapes, empty_tensors
from resharding.layouts import hf_layout, mcore_layout
from tests.models import LLAMA3_ROPE, write_model
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


def test_padding_rows_are_not_exported(tmp_path: Path) -> None:
    write_model(tmp_path / "in", num_key_value_heads=4, vocab_size=203)
    run_ranks(4, export, tmp_path / "in", str(tmp_path / "out"), ParallelConfig(tp=4), torch.float32)
    found = files_of(tmp_path / "out")
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (203, 64)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 203


def test_shards_with_an_index_are_written_and_read(tmp_path: Path) -> None:
    model = ModelConfig.from_directory(write_model(tmp_path / "in", "qwen2"))
    full = files_of(tmp_path / "in")
    write_hf(tmp_path / "out", full, model, shard_bytes=60_000)
    names = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in full.values()) and set(index["weight_map"]) == set(full)
    for parallel in (ParallelConfig(), ParallelConfig(tp=2)):
        for a, b in zip(read(tmp_path / "out", parallel), read(tmp_path / "in", parallel)):
            assert_same(a, b)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    (tmp_path / "out" / names[1]).unlink()
    with pytest.raises(UserError, match=f"lacks the shards {names[1]}"):
        read(tmp_path / "out")


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


@pytest.mark.parametrize("given", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
                                   {"rope_theta": 1000000}, {"rope_theta": 1e6, "rope_scaling": None}])
def test_an_exported_config_gives_the_rotary_base_to_old_and_new_readers(tmp_path: Path, given: dict[str, Any]) -> None:
    write_model(tmp_path / "in", "qwen2")
    data = json.loads((tmp_path / "in/config.json").read_text())
    data.pop("rope_parameters", None)
    (tmp_path / "in/config.json").write_text(json.dumps({**data, **given}))
    model = ModelConfig.from_directory(tmp_path / "in")
    write_hf(tmp_path / "out", {n: t.bfloat16() for n, t in files_of(tmp_path / "in").items()}, model)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["rope_theta"] == 1e6
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters["rope_theta"] == 1e6 and config.dtype == torch.bfloat16
    assert ModelConfig.from_directory(tmp_path / "out") == model.with_options(dtype="bfloat16")


@pytest.mark.parametrize("family, changes", [
    ("llama", dict(rope_parameters=LLAMA3_ROPE, max_position_embeddings=512, head_dim=32)),
    ("qwen2", dict(tie_word_embeddings=True)), ("llama", {})])
def test_a_config_made_from_sizes_alone_loads_in_transformers_to_the_same_logits(
        tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    write_model(tmp_path / "in", family, **changes)
    model = ModelConfig.from_directory(tmp_path / "in").with_options(hf={})
    write_hf(tmp_path / "out", files_of(tmp_path / "in"), model)
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / d, dtype=torch.float32) for d in ("in", "out"))
    ids = torch.arange(3, 200)[None]
    with torch.no_grad():
        assert torch.equal(a(ids).logits, b(ids).logits)
    old_reader = hf_config(model, "float32")  # rope_scaling and rope_theta only
    assert ModelConfig.from_hf({k: v for k, v in old_reader.items() if k != "rope_parameters"}) == ModelConfig.from_hf(old_reader)


def test_the_files_beside_the_weights_travel_along(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json",
             "vocab.json", "merges.txt"]
    for name in names:
        (tmp_path / "in" / name).write_text(f"content of {name}")
    (tmp_path / "in/notes.txt").write_text("stays")
    write_hf(tmp_path / "out", files_of(tmp_path / "in"), ModelConfig.from_directory(tmp_path / "in"), source=tmp_path / "in")
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*names, "config.json", SINGLE])
    assert all((tmp_path / "out" / n).read_text() == f"content of {n}" for n in names)


def test_a_write_that_fails_half_way_leaves_the_old_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "in")
    model, full = ModelConfig.from_directory(tmp_path / "in"), files_of(tmp_path / "in")
    write_hf(tmp_path / "out", full, model)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("checkpoint.hf_writer._write_at", broken)
    with pytest.raises(OSError, match="no space left"):
        write_hf(tmp_path / "out", {n: t + 1 for n, t in full.items()}, model, overwrite=True)
    assert_same(files_of(tmp_path / "out"), full)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_incomplete_or_misshapen_tensors_are_not_written(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    model, full = ModelConfig.from_directory(tmp_path / "in"), files_of(tmp_path / "in")
    with pytest.raises(WeightsError, match="missing or unknown tensors lm_head.weight"):
        write_hf(tmp_path / "out", {n: t for n, t in full.items() if n != "lm_head.weight"}, model)
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \(63,\)"):
        write_hf(tmp_path / "out", {**full, "model.norm.weight": torch.ones(63)}, model)
    assert not (tmp_path / "out").exists()


def test_the_real_small_llama_survives_the_round_trip(tmp_path: Path, stories260k: Path | None) -> None:
    source = stories260k or write_model(tmp_path / "in", tie_word_embeddings=True)
    assert run_ranks(2, export, source, str(tmp_path / "out"), ParallelConfig(tp=2), torch.float32) == [None, None]
    assert_same({n: t for n, t in files_of(tmp_path / "out").items()}, {n: t for n, t in files_of(source).items() if n != "lm_head.weight"})
