"""Writing HF directories tensor by tensor: what safetensors and transformers read, whole or absent, by one process or by many."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint.hf import INDEX, SINGLE, HFWriter, read_hf, write_hf
from checkpoint.trtllm_engine import EngineWriter
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import SyncError, WeightsError
from resharding.layout import Layout, empty_tensors
from resharding.layouts import hf_layout
from resharding.layouts.trtllm_engine import EngineMapping
from tests.models import write_model
from tests.resharding.direct import assert_same, tiny
from tests.worker_pool import run_ranks


def files_of(directory: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def mixed() -> tuple[ModelConfig, Layout, dict[str, Tensor]]:
    """A bfloat16 model with float32 correction biases, odd sizes among them, and random values."""
    hf = dict(model_type="glm4_moe", hidden_size=6, intermediate_size=10, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
              head_dim=3, vocab_size=11, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=5, n_shared_experts=1,
              first_k_dense_replace=1, rope_theta=1e4, max_position_embeddings=32)
    model = ModelConfig.from_hf(hf)
    layout = hf_layout(model, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    return model, layout, {t.name: torch.randn(t.shape, generator=generator).to(t.dtype) for t in layout.tensors}


def written(directory: Path, order: list[str] | None = None, **options: Any) -> dict[str, Tensor]:
    model, layout, tensors = mixed()
    with HFWriter(directory, layout, model, torch.bfloat16, **options) as writer:
        for name in order or [local.name for local in layout.tensors]:
            writer.write(name, tensors[name])
    return tensors


@pytest.mark.parametrize("shard_bytes", [5 << 30, 700, 1])
def test_any_reader_finds_the_tensors_aligned_and_in_any_order_of_writing(tmp_path: Path, shard_bytes: int) -> None:
    expected = written(tmp_path / "out", shard_bytes=shard_bytes)
    assert {t.dtype for t in expected.values()} == {torch.bfloat16, torch.float32}
    assert_same(files_of(tmp_path / "out"), expected)
    written(tmp_path / "other", sorted(expected, reverse=True), shard_bytes=shard_bytes)
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()
        if file.suffix == ".safetensors":
            raw = file.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            for name, entry in json.loads(raw[8:8 + length]).items():
                if name != "__metadata__":
                    assert (8 + length + entry["data_offsets"][0]) % expected[name].itemsize == 0
            with safe_open(file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
    if shard_bytes < 5 << 30:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values()) and set(index["weight_map"]) == set(expected)
        assert all((tmp_path / "out" / file).stat().st_size < 5000 for file in index["weight_map"].values())


def test_shards_with_an_index_are_written_and_read(tmp_path: Path) -> None:
    model = ModelConfig.from_directory(write_model(tmp_path / "in", "qwen2"))
    full = files_of(tmp_path / "in")
    write_hf(tmp_path / "out", full, model, shard_bytes=60_000)
    names = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    layout = hf_layout(model, torch.float32)
    tensors = empty_tensors(layout)
    read_hf(tmp_path / "out", layout, tensors, model)
    assert_same(tensors, full)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        (tmp_path / "in").mkdir()
        (tmp_path / "in/tokenizer.json").write_text("{}")
        os.chmod(tmp_path / "in/tokenizer.json", 0o600)
        written(tmp_path / "out", source=tmp_path / "in", shard_bytes=700)
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "out").iterdir()} == {"0o640"}
    assert oct((tmp_path / "out").stat().st_mode & 0o777) == "0o750"


def test_the_files_beside_the_weights_travel_along(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json",
             "vocab.json", "merges.txt", "tokenizer.model", "qwen.tiktoken", "modeling_deepseek.py", "configuration_deepseek.py"]
    for name in names:
        (tmp_path / "in" / name).write_text(f"content of {name}")
    (tmp_path / "in/notes.txt").write_text("stays")
    model = ModelConfig.from_directory(tmp_path / "in")
    for overwrite in (False, True):
        write_hf(tmp_path / "out", files_of(tmp_path / "in"), model, source=tmp_path / "in", overwrite=overwrite)
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*names, "config.json", SINGLE])
    assert all((tmp_path / "out" / n).read_text() == f"content of {n}" for n in names)


def test_a_write_that_fails_half_way_leaves_the_old_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = written(tmp_path / "out")

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("checkpoint.hf_writer._write_at", broken)
        with pytest.raises(OSError, match="no space left"):
            written(tmp_path / "out", overwrite=True)
    assert_same(files_of(tmp_path / "out"), full)
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(UserError, match="is not empty"):
        written(tmp_path / "out")
    for name in ("write_companions", "_sync_to_disk"):  # before the first tensor, and after the last
        with monkeypatch.context() as patch:
            patch.setattr(f"checkpoint.hf_writer.{name}", broken)
            with pytest.raises(OSError, match="no space left"):
                written(tmp_path / "new")
        assert os.listdir(tmp_path) == ["out"]


def _killed(directory: Path, kind: str, renaming: bool) -> None:
    """A process of its own that is killed in the middle of writing, or between the two renames of a replacement."""
    if (child := os.fork()) == 0:
        real = Path.rename
        try:
            with writer_of(directory, kind, overwrite=True) as writer:
                if not renaming:
                    os.kill(os.getpid(), signal.SIGKILL)
                fill(writer, kind)
                Path.rename = lambda self, target: (  # type: ignore[method-assign,assignment,return-value]
                    os.kill(os.getpid(), signal.SIGKILL) if self.name.startswith(".tmp-") else real(self, target))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def writer_of(directory: Path, kind: str, **options: Any) -> Any:
    if kind == "engine":
        return EngineWriter(directory, tiny(), EngineMapping(tp=2), torch.float32, **options)
    model, layout, _ = mixed()
    return HFWriter(directory, layout, model, torch.bfloat16, shared=kind == "shared", **options)


def fill(writer: Any, kind: str) -> None:
    if kind == "engine":
        for layout in writer.layouts:
            for local in layout.tensors:
                writer.write(layout.rank, local.name, torch.ones(local.shape, dtype=local.dtype))
        return
    for name, tensor in mixed()[2].items():
        writer.write(name, tensor)


@pytest.mark.parametrize("kind", ["hf", "shared", "engine"])
def test_what_a_killed_writer_leaves_is_taken_over_by_the_next(tmp_path: Path, kind: str) -> None:
    out, temporary = tmp_path / "out", [".tmp-out-0", ".tmp-out-0.lock"]
    for _ in range(2):
        _killed(out, kind, renaming=False)
        assert sorted(os.listdir(tmp_path)) == temporary
    (tmp_path / ".tmp-out-0/stale").touch()
    with writer_of(out, kind) as writer:
        fill(writer, kind)
    content = {p.name: p.read_bytes() for p in out.iterdir()}
    assert os.listdir(tmp_path) == ["out"] and "stale" not in content
    (out / "config.json").write_text("older")
    _killed(out, kind, renaming=True)  # the old directory is aside, the new one not there yet
    assert sorted(os.listdir(tmp_path)) == [".old-out-0", *temporary]
    with pytest.raises(UserError, match="is not empty; .*--overwrite"), writer_of(out, kind):
        pass
    assert os.listdir(tmp_path) == ["out"] and (out / "config.json").read_text() == "older"
    with writer_of(out, kind, overwrite=True) as writer:
        fill(writer, kind)
    assert os.listdir(tmp_path) == ["out"] and {p.name: p.read_bytes() for p in out.iterdir()} == content


@pytest.mark.parametrize("kind", ["hf", "engine"])
def test_a_second_live_writer_of_a_directory_is_refused(tmp_path: Path, kind: str) -> None:
    with writer_of(tmp_path / "out", kind) as writer:
        for other in ("hf", "engine"):
            with pytest.raises(UserError, match=f"out' is being written by process {os.getpid()} on .*give another directory"):
                with writer_of(tmp_path / "out", other):
                    pass
        with writer_of(tmp_path / "beside", kind) as beside:
            fill(beside, kind)
        fill(writer, kind)
    assert sorted(os.listdir(tmp_path)) == ["beside", "out"]


def test_nothing_is_published_that_is_not_whole(tmp_path: Path) -> None:
    model, layout, tensors = mixed()
    first, second, *rest = [local.name for local in layout.tensors]

    def attempt(calls: list[tuple[str, Tensor, tuple[int, int] | None]]) -> str:
        with pytest.raises(WeightsError) as caught:
            with HFWriter(tmp_path / "out", layout, model, torch.bfloat16) as writer:
                for name in rest:
                    writer.write(name, tensors[name])
                for call in calls:
                    writer.write(*call)
        assert not list(tmp_path.iterdir())
        return str(caught.value)

    assert attempt([(first, tensors[first], None)]).endswith(f"tensors were not written whole: {second}")
    assert attempt([(first, tensors[first][:5], (0, 5)), (first, tensors[first][6:], (6, 11)), (second, tensors[second], None)]).endswith(
        f"tensors were not written whole: {first}")
    assert attempt([(first, tensors[first], None), (first, tensors[first][:1], (0, 1)), (second, tensors[second], None)]).endswith(
        f"tensors were written more than once: {first}")
    assert "lm_tail is no tensor of the layout" in attempt([("lm_tail", tensors[first], None)])
    assert f"{first} has shape (11, 6) and dtype torch.float32" in attempt([(first, tensors[first].float(), None)])
    assert f"{first} has shape (4, 6)" in attempt([(first, tensors[first][:4], (0, 5))])
    assert "rows 8 to 12 of 11" in attempt([(first, tensors[first][:4], (8, 12))])


def test_incomplete_or_misshapen_tensors_are_not_written(tmp_path: Path) -> None:
    model = tiny()
    full = {t.name: torch.zeros(t.shape) for t in hf_layout(model, torch.float32).tensors}
    with pytest.raises(WeightsError, match="missing or unknown tensors lm_head.weight"):
        write_hf(tmp_path / "out", {n: t for n, t in full.items() if n != "lm_head.weight"}, model)
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \(7,\)"):
        write_hf(tmp_path / "out", {**full, "model.norm.weight": torch.ones(7)}, model)
    assert not (tmp_path / "out").exists()


def write_shared(directory: str, fault: str | None) -> str | None:
    """Every rank writes every second row of every tensor; the text of the error, if any."""
    model, layout, tensors = mixed()
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        with HFWriter(directory, layout, model, torch.bfloat16, shard_bytes=900, shared=True) as writer:
            for local in layout.tensors:
                for row in range(rank, local.shape[0], world):
                    writer.write(local.name, tensors[local.name][row:row + 1], (row, row + 1))
            if fault == "raises" and rank == 1:
                raise OSError("no space left on device")
            if fault == "twice" and rank == 1:
                writer.write("model.norm.weight", tensors["model.norm.weight"][:1], (0, 1))
    except (UserError, WeightsError, SyncError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_ranks_write_one_directory_together(tmp_path: Path) -> None:
    expected = written(tmp_path / "alone", shard_bytes=900)
    assert run_ranks(3, write_shared, str(tmp_path / "out"), None) == [None] * 3
    assert_same(files_of(tmp_path / "out"), expected)
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    for fault, words in (("raises", "SyncError: writing .* OSError: no space left"), ("twice", "WeightsError: .* more than once: model.norm.weight")):
        errors = run_ranks(2, write_shared, str(tmp_path / "bad"), fault)
        assert all(re.match(words, error) for error in errors), errors
    assert all("is not empty" in error for error in run_ranks(2, write_shared, str(tmp_path / "out"), None))
    assert sorted(os.listdir(tmp_path)) == ["alone", "out"]
