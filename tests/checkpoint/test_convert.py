"""Conversion between directories by one process: there and back is the identity, and what cannot be right is refused by name."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from checkpoint import megatron_lm
from checkpoint.convert import FORMS, check_destination, open_model, verify, write_hf, write_mcore
from checkpoint.mcore import load_model, model_config_of
from checkpoint.megatron_args import lm_arguments, model_of
from checkpoint.safe_pickle import Placeholder, load_common
from checkpoint.torch_archive import after_values, before_values, find_values
from checkpoint.torch_dist import TorchDistFiles
from checkpoint.torch_dist_writer import TorchDistWriter, combined
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import WeightsError
from resharding.layouts.mcore_files import mcore_files_layout
from tests.models import FAMILY_TINY, write_model
from tests.worker_pool import run_ranks

SMALL: dict[str, Any] = dict(num_hidden_layers=2, dtype="bfloat16")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: Any) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    made = {f: write_model(root / f, f, tie_word_embeddings=f == "llama", **SMALL) for f in FAMILY_TINY}
    (made["qwen2"] / "tokenizer.json").write_text("{}")
    (made["qwen2"] / "chat_template.jinja").write_text("{{ messages }}")
    return made


@pytest.fixture(scope="module")
def megatron(sources: dict[str, Path], tmp_path_factory: Any) -> Path:
    """qwen2 in Megatron's format, TP2; copy it before damaging it."""
    path = tmp_path_factory.mktemp("megatron") / "model"
    to_mcore(sources["qwen2"], path, ParallelConfig(tp=2))
    return path


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


@pytest.mark.parametrize("family", sorted(FAMILY_TINY))
def test_there_and_back_is_the_identity(family: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Through two chunkings and two paddings of the vocabulary, whatever the family; correction biases stay in float32."""
    to_mcore(sources[family], tmp_path / "a", ParallelConfig(tp=2, ep=2, etp=1))
    to_mcore(tmp_path / "a", tmp_path / "b", ParallelConfig(tp=4, etp=2), kind="mcore", divisible_by=8, form="megatron-lm", file_bytes=100_000)
    to_hf(tmp_path / "b", tmp_path / "back", shard_bytes=100_000)
    want, have = tensors(sources[family]), tensors(tmp_path / "back")
    want = {name.replace(".mlp.experts", ".block_sparse_moe.experts").replace(".mlp.gate.", ".block_sparse_moe.gate."): v
            for name, v in want.items()} if family == "mixtral" else want
    with open_model("hf", sources[family]) as a, open_model("hf", tmp_path / "back") as b:
        verify(a, b)
    if "experts" not in str(want.keys()) or want.keys() == have.keys():  # some families' files hold all experts in one tensor
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


def test_verify_names_what_differs(megatron: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    damaged = shutil.copytree(megatron, tmp_path / "damaged")
    with TorchDistFiles(damaged / "weights") as files:
        chunk = files["decoder.layers.self_attention.linear_qkv.bias"].chunks[-1].place
    file = damaged / "weights" / chunk.file
    data = bytearray(file.read_bytes())
    data[chunk.offset + 704] ^= 1  # the first value: a head of the second query group of the last layer
    file.write_bytes(data)
    with open_model("hf", sources["qwen2"]) as source:
        with open_model("mcore", megatron) as written:
            verify(source, written)
        with open_model("mcore", damaged) as written, pytest.raises(WeightsError, match=r"differs .* in model.layers.1.self_attn.q_proj.bias$"):
            verify(source, written)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rewritten(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write the weights anew with some keys changed, and without a manifest."""
    with TorchDistFiles(directory / "weights") as files:
        held = {key: t[tuple(slice(0, n) for n in t.shape)].clone() for key, t in files.items()}
    change(held)
    shutil.rmtree(directory / "weights")
    (directory / "manifest.json").unlink(missing_ok=True)
    store(directory / "weights", held)
    manifest = {"files": {}}
    (directory / "manifest.json").write_text(str(manifest).replace("'", '"'))


def store(weights: Path, held: dict[str, torch.Tensor], common: dict[str, Any] | None = None) -> None:
    """`torch_dist` weights as torch itself writes them, in one chunk a key."""
    from torch.distributed import checkpoint as dcp

    weights.mkdir(parents=True)
    dcp.save(held, storage_writer=dcp.FileSystemWriter(str(weights)), no_dist=True)
    torch.save(common or {}, weights / "common.pt")
    (weights / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no .metadata": (lambda d: (d / "weights/.metadata").unlink(), r"\.metadata"),
    "a data file is missing": (lambda d: (d / "weights/__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "a data file is cut short": (lambda d: cut(d / "weights/__0_0.distcp"), r"__0_0\.distcp has \d+ bytes instead"),
    "cut short, and no manifest says so": (lambda d: ((d / "manifest.json").write_text('{"files": {}}'), cut(d / "weights/__0_0.distcp"),
                                                      cut(d / "weights/__0_0.distcp"), [cut(d / "weights/__0_0.distcp") for _ in range(20)]),
                                           r"is cut short: __0_0\.distcp has \d+ bytes of \d+"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
    "pickle damaged": (lambda d: ((d / "manifest.json").write_text('{"files": {}}'), (d / "weights/.metadata").write_bytes(b"no pickle")),
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
    "another backend": (lambda d: (d / "weights/metadata.json").write_text('{"sharded_backend": "zarr00000", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'),
                        "zarr|instead of"),
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


# directories of Megatron-LM and Megatron-Bridge


def lm_directory(root: Path, source: Path, family: str, names: str = "te", iteration: str = "123") -> Path:
    """What Megatron-LM leaves: optimizer and random state beside the weights, and the run's arguments, with things in them that only it knows."""
    model = ModelConfig.from_directory(source)
    with open_model("hf", source) as opened:
        layout = mcore_files_layout(model, torch.bfloat16, vocabulary_rows=256, held=local_names(model) if names == "local" else None)
        from checkpoint.streaming import Assembler, Part
        from resharding.layout import canonical_shapes
        from resharding.plan import make_plan

        made = Assembler(make_plan([opened.layout], [layout], canonical_shapes(model), source_is_everywhere=True), opened.files)
        held = {local.name: made.values(Part.whole(local)).clone() for local in layout.tensors}
    held.update({"optimizer.state.exp_avg." + key: t.float() for key, t in list(held.items())[:2]})
    arguments = argparse.Namespace(**lm_arguments(model), attention_backend=Unknown(3), rank=0, params_dtype=torch.bfloat16)
    weights = root / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)
    store(weights, held, {"args": arguments, "checkpoint_version": 3.0, "iteration": 123, "opt_param_scheduler": {"max_lr": 1.0}})
    (root / megatron_lm.TRACKER).write_text(iteration)
    return root


class Unknown:
    """Stands for the enumerations and objects of Megatron-LM that a reader does not have."""

    def __init__(self, value: int) -> None:
        self.value = value


def local_names(model: ModelConfig) -> set[str]:
    """The norms under the names of Megatron's unchanged local spec."""
    prefixes = [f"decoder.layers.{i}." for i in range(model.num_layers)] + ["decoder.layers."]
    names = ("pre_mlp_layernorm.weight", "self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight") if model.mla else (
        "mlp.linear_fc1.layer_norm_weight", "self_attention.q_layernorm.weight")
    return {prefix + name for prefix in prefixes for name in names}


@pytest.mark.parametrize("family, names", [("llama", "te"), ("qwen3_moe", "te"), ("qwen3_moe", "local"), ("deepseek_v3", "local")])
def test_a_run_of_megatron_lm_is_read(family: str, names: str, sources: dict[str, Path], tmp_path: Path) -> None:
    root = lm_directory(tmp_path / "run", sources[family], family, names)
    with open_model("mcore", root) as opened, open_model("hf", sources[family]) as source:
        assert opened.model.with_options(bos_token_id=1, eos_token_ids=(2,)) == source.model  # from the arguments alone
        verify(source, opened)
    with open_model("mcore", root / "iter_0000123", hf_config=sources[family]) as opened:
        assert opened.model == ModelConfig.from_directory(sources[family])


def test_megatron_lm_directories_that_are_not_whole_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    root = lm_directory(tmp_path / "run", sources["llama"], "llama")
    with pytest.raises(UserError, match="num_layers is 2 in the checkpoint and 3 in config.json"):
        other = write_model(tmp_path / "other", "llama", num_hidden_layers=3, tie_word_embeddings=True)
        to_hf(root, tmp_path / "out", hf_config=other)
    (root / megatron_lm.TRACKER).write_text("124")
    with pytest.raises(UserError, match="names iter_0000124, which is not in .*; it holds iter_0000123"):
        to_hf(root, tmp_path / "out")
    (root / megatron_lm.TRACKER).unlink()
    with pytest.raises(UserError, match="holds iter_0000123 and no latest_checkpointed_iteration.txt"):
        to_hf(root, tmp_path / "out")
    (root / megatron_lm.TRACKER).write_text("123")
    (root / "iter_0000123/mp_rank_00").mkdir()
    with pytest.raises(UserError, match="`torch` format .*--ckpt-format torch_dist"):
        to_hf(root, tmp_path / "out")
    with pytest.raises(UserError, match="is no model in Megatron's format"):
        to_hf(sources["llama"], tmp_path / "out")
    with pytest.raises(UserError, match="does not exist"):
        to_hf(tmp_path / "nowhere", tmp_path / "out")


@pytest.mark.parametrize("family", sorted(FAMILY_TINY))
def test_what_we_write_for_megatron_describes_the_model(family: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Without config.json, the arguments and run_config.yaml alone give the same architecture, or say that they do not."""
    source = ModelConfig.from_directory(sources[family])
    for form, folder in (("megatron-lm", "release"), ("megatron-bridge", "iter_0000000")):
        to_mcore(sources[family], tmp_path / form, ParallelConfig(tp=2, etp=1, ep=2 if source.moe else 1), form=form)
        shutil.rmtree(tmp_path / form / folder / "tokenizer")
        (tmp_path / form / "manifest.json").unlink()
        if family == "gpt_oss":
            with pytest.raises(UserError, match="--hf-config"):
                to_hf(tmp_path / form, tmp_path / "out")
            continue
        with open_model("mcore", tmp_path / form) as opened, open_model("hf", sources[family]) as hf:
            assert opened.model.with_options(bos_token_id=1, eos_token_ids=(2,)) == source
            verify(hf, opened)
    assert (tmp_path / "megatron-lm" / megatron_lm.TRACKER).read_text() == "release"  # Megatron-LM then asks for no optimizer
    common = torch.load(tmp_path / "megatron-lm/release/common.pt", weights_only=False)
    assert common["args"].padded_vocab_size == 256 and common["args"].tensor_model_parallel_size == 2 and common["checkpoint_version"] == 3.0
    section = yaml.safe_load((tmp_path / "megatron-bridge/iter_0000000/run_config.yaml").read_text())["model"]
    assert section["_target_"].startswith("megatron.bridge.models.") and section["num_layers"] == 2
    assert int(torch.load(tmp_path / "megatron-bridge/latest_train_state.pt", weights_only=True)["step"]) == 0


def test_a_run_config_with_python_objects_is_read(sources: dict[str, Path], tmp_path: Path) -> None:
    """Megatron-Bridge's older files hold tags; nothing of them is made."""
    to_mcore(sources["qwen2"], tmp_path / "b", form="megatron-bridge")
    path = tmp_path / "b/iter_0000000/run_config.yaml"
    (tmp_path / "b/manifest.json").unlink()
    path.write_text(path.read_text().replace("model:\n", "model:\n  init_method: !!python/object/apply:os.system ['touch " + str(tmp_path / "owned") + "']\n", 1))
    with open_model("mcore", tmp_path / "b") as opened:
        assert opened.model.family == "qwen2"
    assert not (tmp_path / "owned").exists()


def test_options_that_no_family_has_are_refused() -> None:
    fields = dict(num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=11, normalization="RMSNorm", position_embedding_type="rope")
    assert model_of(fields, "x").family == "llama"
    for change, words in (({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"), ({"position_embedding_type": "learned_absolute"}, "learned_absolute"),
                          ({"gated_linear_unit": False}, "gated_linear_unit"), ({"add_bias_linear": True}, "add_bias_linear"),
                          ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma")):
        with pytest.raises(UserError, match=words):
            model_of({**fields, **change}, "x")
    with pytest.raises(UserError, match="does not say 'hidden_size'"):
        model_of({"num_layers": 2, "num_attention_heads": 2}, "x")


# the files


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_checkpoint_is_run(megatron: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(megatron, tmp_path / "m")
    torch.save({"args": argparse.Namespace(num_layers=2, other=Evil(tmp_path / "owned"))}, tmp_path / "common.pt")
    loaded = load_common(tmp_path / "common.pt")
    assert loaded["args"].num_layers == 2 and isinstance(loaded["args"].other, Placeholder)
    (directory / "manifest.json").write_text('{"files": {}}')
    (directory / "weights/.metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(UserError, match="cannot be read"):
        to_hf(directory, tmp_path / "out")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("tensor", [torch.arange(24.0).view(2, 3, 4), torch.ones(7, dtype=torch.bfloat16), torch.tensor(3.5), torch.zeros(3, 0),
                                    torch.arange(5), torch.ones(2, 3, dtype=torch.float16)], ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_an_archive_is_what_torch_save_writes(tensor: torch.Tensor) -> None:
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    ours = before_values(tensor.dtype, tuple(tensor.shape)) + raw + after_values(tensor.dtype, tuple(tensor.shape), zlib.crc32(raw))
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape and torch.equal(loaded, tensor)
    assert zipfile.ZipFile(io.BytesIO(ours)).testzip() is None
    torchs = io.BytesIO()
    torch.save(tensor, torchs)
    for data in (ours, torchs.getvalue()):
        found = find_values(io.BytesIO(data))
        assert found is not None and (found.dtype, found.shape) == (tensor.dtype, tuple(tensor.shape))
        assert data[found.start:found.start + len(raw)] == raw and found.start % 64 == 0


def test_tensors_that_are_not_plain_are_left_to_torch_load(sources: dict[str, Path], tmp_path: Path) -> None:
    transposed, data = torch.arange(12.0).view(3, 4).t(), io.BytesIO()
    torch.save(transposed, data)
    assert find_values(data) is None
    part = io.BytesIO()
    torch.save(torch.arange(12.0).view(3, 4)[1:2], part)  # torch writes the whole storage
    found = find_values(part)
    assert found is not None and part.getvalue()[found.start:found.start + 16] == torch.arange(4.0, 8.0).numpy().tobytes()
    with pytest.raises(ValueError):
        find_values(io.BytesIO(b"no archive at all"))
    held = {"transposed": transposed, "plain": torch.arange(6.0)}
    store(tmp_path / "w", held)
    with TorchDistFiles(tmp_path / "w") as files:
        assert torch.equal(files["transposed"][0:4, 1:3], transposed[:, 1:3]) and torch.equal(files["plain"][2:5,], torch.arange(2.0, 5.0))


def test_checksums_of_parts_give_that_of_the_whole() -> None:
    data = os.urandom(100_003)
    for at in (0, 1, 63, 4096, 99_999, len(data)):
        assert combined(zlib.crc32(data[:at]), zlib.crc32(data[at:]), len(data) - at) == zlib.crc32(data)


def convert_on_ranks(source: str, destination: str, back: str) -> None:
    to_mcore(Path(source), Path(destination), ParallelConfig(tp=2, etp=1))
    to_hf(Path(destination), Path(back))


def test_ranks_share_the_work(sources: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, convert_on_ranks, str(sources["qwen3_moe"]), str(tmp_path / "m"), str(tmp_path / "back"))
    sizes = [p.stat().st_size for p in (tmp_path / "m/weights").glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 1.3 * min(sizes)
    assert tensors(tmp_path / "back") == tensors(sources["qwen3_moe"])
    from checkpoint.run_state import verify as verify_files

    verify_files(tmp_path / "m")  # the manifest's checksums, which were computed while writing, are those of the files
    assert load_model  # what training reads it with: see test_convert_megatron
