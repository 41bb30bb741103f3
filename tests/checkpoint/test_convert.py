"""Conversion between directories by one process: there and back is the identity, and what cannot be right is refused by name."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import megatron_lm
from checkpoint.convert import FORMS, check_destination, open_model, verify, write_hf, write_mcore
from checkpoint.mcore import model_config_of
from checkpoint.run_state import verify as verify_files
from checkpoint.torch_archive import find_values
from checkpoint.torch_dist import TorchDistFiles
from checkpoint.torch_dist_writer import TorchDistWriter
from checkpoint.trtllm_engine import write_engine
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import WeightsError
from resharding.layouts.trtllm_engine import EngineMapping
from tests.checkpoint.conversion import store, tensors, to_hf, to_mcore
from tests.models import FAMILY_TINY
from tests.worker_pool import run_ranks


@pytest.fixture(scope="module")
def megatron(sources: dict[str, Path], tmp_path_factory: Any) -> Path:
    """qwen2 in Megatron's format, TP2; copy it before damaging it."""
    path: Path = tmp_path_factory.mktemp("megatron") / "model"
    to_mcore(sources["qwen2"], path, ParallelConfig(tp=2))
    return path


@pytest.mark.parametrize("family", sorted(FAMILY_TINY))
def test_there_and_back_is_the_identity(family: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Through two chunkings and two paddings of the vocabulary, whatever the family; correction biases stay in float32."""
    to_mcore(sources[family], tmp_path / "a", ParallelConfig(tp=2, ep=2, etp=1))
    to_mcore(tmp_path / "a", tmp_path / "b", ParallelConfig(tp=4, etp=2), kind="mcore", divisible_by=8, form="megatron-lm", file_bytes=60_000)
    to_hf(tmp_path / "b", tmp_path / "back", shard_bytes=60_000)
    want, have = tensors(sources[family]), tensors(tmp_path / "back")
    if family == "mixtral":  # transformers 5 names this block as in the other families; published files do not
        want = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in want.items()}
    assert have == want
    rows = {"a": 256, "b": 224}
    for name, weights in (("a", tmp_path / "a/weights"), ("b", tmp_path / "b/release")):
        with TorchDistFiles(weights) as files:
            assert files["embedding.word_embeddings.weight"].shape[0] == rows[name]
    assert len(list((tmp_path / "b/release").glob("*.distcp"))) > 2 and len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert ModelConfig.from_directory(tmp_path / "back") == ModelConfig.from_directory(sources[family])


def test_companions_travel(sources: dict[str, Path], tmp_path: Path) -> None:
    for form in FORMS:
        to_mcore(sources["qwen2"], tmp_path / form, form=form)
        to_hf(tmp_path / form, tmp_path / "back" / form)
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (tmp_path / "back" / form / name).read_bytes() == (sources["qwen2"] / name).read_bytes()


def test_dtype_is_kept_unless_another_is_asked_for(sources: dict[str, Path], tmp_path: Path) -> None:
    to_mcore(sources["deepseek_v3"], tmp_path / "kept")
    to_mcore(sources["deepseek_v3"], tmp_path / "wide", dtype=torch.float32)
    to_mcore(tmp_path / "wide", tmp_path / "narrow", kind="mcore", dtype=torch.bfloat16)
    for name, dtype in (("kept", torch.bfloat16), ("wide", torch.float32), ("narrow", torch.bfloat16)):
        assert model_config_of(tmp_path / name).dtype == str(dtype).removeprefix("torch.")
        with TorchDistFiles(tmp_path / name / "weights") as files:
            assert {files[key].dtype for key in files if "expert_bias" not in key} == {dtype}
            assert files["decoder.layers.1.mlp.router.expert_bias"].dtype == torch.float32
    with open_model("mcore", tmp_path / "kept") as a, open_model("mcore", tmp_path / "narrow") as b:
        verify(a, b)
    mixed = shutil.copytree(sources["qwen2"], tmp_path / "mixed")
    held = load_file(mixed / "model.safetensors")
    held["model.norm.weight"] = held["model.norm.weight"].float() + 1e-5
    save_file(held, mixed / "model.safetensors", metadata={"format": "pt"})
    to_mcore(mixed, tmp_path / "mixed-mcore")
    with TorchDistFiles(tmp_path / "mixed-mcore/weights") as files:
        assert torch.equal(files["decoder.final_layernorm.weight"][0:64,], held["model.norm.weight"])


def test_values_that_float16_cannot_hold_are_refused_by_name(sources: dict[str, Path], tmp_path: Path) -> None:
    """65519 is rounded to the largest float16, what is infinite already stays so, 65520 is too much: in any form that is written."""
    source, name = shutil.copytree(sources["qwen2"], tmp_path / "in"), "model.layers.1.mlp.down_proj.weight"
    held = {n: t.float() for n, t in load_file(source / "model.safetensors").items()}
    for value, fits in ((65519.0, True), (float("inf"), True), (65520.0, False), (-3e38, False)):
        held[name][5, 7] = value
        save_file(held, source / "model.safetensors", metadata={"format": "pt"})
        with open_model("hf", source) as opened:
            writes = {"hf": lambda: write_hf(opened, tmp_path / "hf", torch.float16, overwrite=True),
                      "mcore": lambda: write_mcore(opened, tmp_path / "mcore", ParallelConfig(tp=2), torch.float16, overwrite=True),
                      "engine": lambda: write_engine(tmp_path / "engine", opened.files, opened.layout, opened.model, EngineMapping(tp=2), torch.float16, True)}
            for write in writes.values():
                if fits:
                    write()
                else:
                    with pytest.raises(UserError, match=re.escape(f"{name} is made, holds values of up to {abs(value):g}, which float16 cannot hold")):
                        write()
        if fits:
            assert load_file(tmp_path / "hf/model.safetensors")[name][5, 7].item() == min(value, 65504.0 if value < 1e9 else value)
    assert sorted(os.listdir(tmp_path)) == ["engine", "hf", "in", "mcore"]


def test_verify_names_what_differs(megatron: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    damaged = shutil.copytree(megatron, tmp_path / "damaged")
    with TorchDistFiles(damaged / "weights") as files:
        chunk = files["decoder.layers.self_attention.linear_qkv.bias"].chunks[-1].place
    file = damaged / "weights" / chunk.file
    data = bytearray(file.read_bytes())
    values = find_values(io.BytesIO(data[chunk.offset:chunk.offset + chunk.length]))
    data[chunk.offset + values.start] ^= 1  # the first value: a query head of the second group of the last layer
    file.write_bytes(data)
    with open_model("hf", sources["qwen2"]) as source:
        with open_model("mcore", megatron) as written:
            verify(source, written)
        with open_model("mcore", damaged) as written, pytest.raises(WeightsError, match=r"differs .* in model.layers.1.self_attn.q_proj.bias$"):
            verify(source, written)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def rewritten(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write the weights anew with some keys changed."""
    with TorchDistFiles(directory / "weights") as files:
        held = {key: t[tuple(slice(0, n) for n in t.shape)].clone() for key, t in files.items()}
    change(held)
    shutil.rmtree(directory / "weights")
    store(directory / "weights", held)
    without_manifest(directory)


def without_manifest(directory: Path) -> None:
    """A manifest that lists no files: what is wrong must be found by looking at them."""
    (directory / "manifest.json").write_text(json.dumps({"files": {}}))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no .metadata": (lambda d: (d / "weights/.metadata").unlink(), r"\.metadata"),
    "a data file is missing": (lambda d: (d / "weights/__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "a data file is cut short": (lambda d: cut(d / "weights/__0_0.distcp"), r"__0_0\.distcp has \d+ bytes instead"),
    "cut short, and no manifest says so": (lambda d: (without_manifest(d), cut(d / "weights/__0_0.distcp")),
                                           r"is cut short: __0_0\.distcp has \d+ bytes of \d+"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
    "pickle damaged": (lambda d: (without_manifest(d), (d / "weights/.metadata").write_bytes(b"no pickle")),
                       r"\.metadata cannot be read"),
    "a tensor is missing": (lambda d: rewritten(d, lambda held: held.pop("decoder.layers.mlp.linear_fc2.weight")),
                            "lacks 1 tensors .*: decoder.layers.mlp.linear_fc2.weight"),
    "a tensor is unknown": (lambda d: rewritten(d, lambda held: held.update({"decoder.layers.mlp.other": torch.zeros(2)})),
                            "holds 1 tensors .*: decoder.layers.mlp.other"),
    "a tensor is misshapen": (lambda d: rewritten(d, lambda held: held.update({"decoder.final_layernorm.weight": torch.zeros(63)})),
                              r"decoder.final_layernorm.weight has shape \(63,\), config.json asks for \(64,\)"),
    "fewer rows than the vocabulary": (lambda d: rewritten(d, lambda held: held.update({"embedding.word_embeddings.weight": torch.zeros(200, 64)})),
                                       "has 200 rows, config.json says vocab_size 203"),
    "the head is not there": (lambda d: rewritten(d, lambda held: held.pop("output_layer.weight")), "tie_word_embeddings false"),
    "layers for multi-token prediction": (lambda d: rewritten(d, lambda held: held.update({"mtp.layers.0.eh_proj.weight": torch.zeros(2)})),
                                          "multi-token prediction .*--without-mtp"),
    "integers": (lambda d: rewritten(d, lambda held: held.update({"decoder.final_layernorm.weight": torch.zeros(64, dtype=torch.int64)})),
                 "decoder.final_layernorm.weight has dtype torch.int64"),
    "another backend": (lambda d: (without_manifest(d), (d / "weights/metadata.json").write_text('{"sharded_backend": "zarr"}')),
                        "is stored as 'zarr'; only 'torch_dist' is read"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_whole_is_refused(kind: str, megatron: Path, tmp_path: Path) -> None:
    damage, message = REFUSED[kind]
    directory = shutil.copytree(megatron, tmp_path / "m")
    damage(directory)
    with pytest.raises(UserError, match=message):
        to_hf(directory, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_multi_token_prediction_is_left_out_when_asked(megatron: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(megatron, tmp_path / "m")
    rewritten(directory, lambda held: held.update({"mtp.layers.0.eh_proj.weight": torch.zeros(2)}))
    to_hf(directory, tmp_path / "out", without_mtp=True)
    assert tensors(tmp_path / "out") == tensors(sources["qwen2"])


def test_only_a_model_is_ever_replaced(sources: dict[str, Path], megatron: Path, tmp_path: Path) -> None:
    ours = shutil.copytree(megatron, tmp_path / "ours")
    with pytest.raises(UserError, match="--overwrite"):
        check_destination(ours, overwrite=False)
    to_mcore(sources["qwen3"], ours, overwrite=True)
    assert model_config_of(ours).family == "qwen3"
    to_mcore(sources["qwen3"], tmp_path / "lm", form="megatron-lm")
    to_mcore(sources["qwen2"], tmp_path / "lm", form="megatron-bridge", overwrite=True)
    assert megatron_lm.find(tmp_path / "lm").form == "megatron-bridge"  # type: ignore[union-attr]
    (ours / "notes.txt").write_text("mine")
    (tmp_path / "lm/iter_0000005").mkdir()
    for path in (ours, tmp_path / "lm", tmp_path):
        with pytest.raises(UserError, match="nothing is overwritten"):
            check_destination(path, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        check_destination(ours / "notes.txt" / "deeper", overwrite=True)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"])
def test_a_failure_leaves_nothing_and_keeps_what_was_there(error: BaseException, sources: dict[str, Path], megatron: Path, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    ours = shutil.copytree(megatron, tmp_path / "ours")
    before = (ours / "weights/__0_0.distcp").read_bytes()
    real, left = TorchDistWriter.write, [5]

    def write(self: TorchDistWriter, *arguments: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise error
        real(self, *arguments)

    monkeypatch.setattr(TorchDistWriter, "write", write)
    for destination in (ours, tmp_path / "new"):
        left[0] = 5
        with pytest.raises((type(error), Exception), match="disk full" if isinstance(error, OSError) else None):
            to_mcore(sources["qwen3"], destination, overwrite=True)
        assert sorted(os.listdir(tmp_path)) == ["ours"]
    assert (ours / "weights/__0_0.distcp").read_bytes() == before


def convert_on_ranks(source: str, destination: str, back: str) -> None:
    to_mcore(Path(source), Path(destination), ParallelConfig(tp=2, etp=1))
    to_hf(Path(destination), Path(back))


def test_ranks_share_the_work(sources: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, convert_on_ranks, str(sources["qwen3_moe"]), str(tmp_path / "m"), str(tmp_path / "back"))
    sizes = [p.stat().st_size for p in (tmp_path / "m/weights").glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 1.3 * min(sizes)
    assert tensors(tmp_path / "back") == tensors(sources["qwen3_moe"])
    verify_files(tmp_path / "m")  # the manifest's checksums, which were computed while writing, are those of the files
