"""Reading HF directories in all their arrangements: split, fused and transposed experts, FP8 blocks; what is not whole is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint.block_fp8 import BlockQuantised
from checkpoint.hf import INDEX, SINGLE, HFFiles, read_hf, write_hf
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.layout import canonical_dtypes, empty_tensors
from resharding.layouts import hf_layout, mcore_layout
from resharding.layouts.fp8 import fp8_layout, fp8_weights
from tests.models import write_model
from tests.resharding.direct import assert_same, mcore_shard

EXPERTS = ["qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe"]
FP8 = torch.float8_e4m3fn


def canonical(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    """What the reader makes of a directory, as canonical tensors."""
    model = ModelConfig.from_directory(directory)
    layout = hf_layout(model, dtype, experts="split")
    tensors = {name: t.fill_(float("nan")) for name, t in empty_tensors(layout).items()}
    read_hf(directory, layout, tensors, model, **options)
    return tensors


def edit_config(directory: Path, **changes: Any) -> Path:
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**data, **changes}))
    return directory


def shard(directory: Path, count: int = 3) -> dict[str, str]:
    """Split model.safetensors into shards with an index, as the hub has them; returns the weight map."""
    held = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {name: files[i * count // len(held)] for i, name in enumerate(held)}
    for file in files:
        save_file({n: t for n, t in held.items() if weight_map[n] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_read_split_and_as_transformers_fuses_them(tmp_path: Path, family: str) -> None:
    """`save_pretrained` writes one tensor per expert; the tensors in memory are fused, and some directories hold them like that."""
    split = write_model(tmp_path / "split", family, num_hidden_layers=2)
    held = load_file(split / SINGLE)
    assert_same(canonical(split), held)
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_text((split / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(split, dtype=torch.float32)
    save_file({name: t.clone() for name, t in model.state_dict().items()}, fused / SINGLE)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(fused / SINGLE)) and "w1" not in str(load_file(fused / SINGLE).keys())
    assert_same(canonical(fused), held)


def test_the_transposed_and_interleaved_experts_of_gpt_oss_are_read(tmp_path: Path) -> None:
    held = load_file(write_model(tmp_path, "gpt_oss", num_hidden_layers=2) / SINGLE)
    found = canonical(tmp_path)
    for layer in range(2):
        p = f"model.layers.{layer}.mlp.experts."
        for expert in range(8):
            for start, name in enumerate(("gate_proj", "up_proj")):
                assert torch.equal(found[f"{p}{expert}.{name}.weight"], held[p + "gate_up_proj"][expert][:, start::2].T)
                assert torch.equal(found[f"{p}{expert}.{name}.bias"], held[p + "gate_up_proj_bias"][expert][start::2])
            assert torch.equal(found[f"{p}{expert}.down_proj.weight"], held[p + "down_proj"][expert].T)
            assert torch.equal(found[f"{p}{expert}.down_proj.bias"], held[p + "down_proj_bias"][expert])
    assert torch.equal(found["model.layers.1.self_attn.sinks"], held["model.layers.1.self_attn.sinks"])
    assert len(found) == len(held) - 2 * 4 + 2 * 8 * 6


def test_the_layout_of_the_files_says_names_and_dtypes_as_stored(tmp_path: Path) -> None:
    held = load_file(write_model(tmp_path, "deepseek_v3", dtype="bfloat16", num_hidden_layers=2) / SINGLE)
    with HFFiles(tmp_path) as files:
        layout = files.layout(ModelConfig.from_directory(tmp_path))
        assert {t.name: (t.shape, t.dtype) for t in layout.tensors} == {n: (tuple(t.shape), t.dtype) for n, t in held.items()}
        assert layout["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
        assert list(files) and set(files) == set(held) and all(torch.equal(files[n], t) for n, t in held.items())


def test_pages_are_given_back_and_values_stay_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = load_file(write_model(tmp_path) / SINGLE)
    monkeypatch.setattr("checkpoint.hf_files.RESIDENT", 50_000)
    with HFFiles(tmp_path) as files:
        found = {name: files[name] for name in files}
        assert files._resident < 50_000 + max(t.nbytes for t in held.values())
        files.release()
        assert files._resident == 0
        assert_same(found, held)


# ------------------------------------------------------------------------------------------------ router correction bias (A09)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def with_bias(directory: Path) -> Path:
    """A bfloat16 model whose fp32 correction biases differ from each other only below bfloat16's precision."""
    held = load_file(write_model(directory, "deepseek_v3", dtype="bfloat16", num_hidden_layers=2) / SINGLE)
    held[BIAS] = torch.tensor([8.0, 8.01, 7.0, 7.0, 8.0, 8.01, 7.0, 7.0])
    save_file(held, directory / SINGLE)
    return directory


def test_the_correction_bias_stays_float32_in_and_out(tmp_path: Path) -> None:
    model = ModelConfig.from_directory(with_bias(tmp_path / "in"))
    expected = load_file(tmp_path / "in" / SINGLE)
    found = canonical(tmp_path / "in", torch.bfloat16)
    assert found[BIAS].dtype == torch.float32 and found[BIAS].tolist() == expected[BIAS].tolist() != expected[BIAS].bfloat16().tolist()
    layout = mcore_layout(model, ParallelConfig(), 0, 1, torch.bfloat16)
    tensors = empty_tensors(layout)
    read_hf(tmp_path / "in", layout, tensors, model)
    assert torch.equal(tensors["decoder.layers.1.mlp.router.expert_bias"], expected[BIAS])
    write_hf(tmp_path / "out", found, model)
    assert_same(load_file(tmp_path / "out" / SINGLE), expected)
    assert canonical_dtypes(model, torch.bfloat16)[BIAS] == torch.float32


def test_a_missing_correction_bias_is_an_error_that_names_it(tmp_path: Path) -> None:
    held = load_file(with_bias(tmp_path) / SINGLE)
    del held[BIAS]
    save_file(held, tmp_path / SINGLE)
    with pytest.raises(UserError, match=rf"lacks 1 tensors of its config \(deepseek_v3\): {BIAS}"):
        canonical(tmp_path)


# ------------------------------------------------------------------------------------------------ FP8 blocks (A11)
def test_a_scale_belongs_to_its_block_whatever_the_last_one_is_cut_to() -> None:
    codes, scales = torch.ones(200, 130).to(FP8), torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    values = BlockQuantised(codes, scales, (128, 128))[:]
    assert [values[at].item() for at in ((0, 0), (127, 127), (127, 128), (128, 127), (199, 129))] == [1.0, 1.0, 2.0, 4.0, 8.0]
    assert values.sum().item() == 54912.0
    stacked = BlockQuantised(codes.expand(3, 200, 130), torch.stack([scales, 2 * scales, 3 * scales]), (128, 128))
    assert all(torch.equal(stacked[i], (i + 1) * values) for i in range(3))
    assert torch.equal(stacked[1:, 5:], torch.stack([stacked[1], stacked[2]])[:, 5:])


def test_regions_of_a_quantised_tensor_equal_those_of_the_whole() -> None:
    codes = torch.randn(70, 50).to(FP8)
    codes.view(torch.uint8).view(-1)[:256] = torch.arange(256, dtype=torch.uint8)  # every code, NaN among them
    scales = torch.rand(5, 3)
    whole = codes.float() * scales.repeat_interleave(16, 0)[:70].repeat_interleave(24, 1)[:, :50]
    tensor = BlockQuantised(codes, scales, (16, 24))
    narrow = BlockQuantised(codes, scales, (16, 24), torch.bfloat16)[3:20, 1:]
    assert torch.equal(narrow.nan_to_num(7.0), whole[3:20, 1:].bfloat16().nan_to_num(7.0))
    for rows, columns in ((slice(None), slice(None)), (slice(15, 17), slice(23, 25)), (slice(3, 3), slice(0, 4)), (slice(64, 70), slice(48, 50))):
        assert torch.equal(tensor[rows, columns].nan_to_num(7.0), whole[rows, columns].nan_to_num(7.0))
    assert whole.isnan().sum() == 2


def quantise(directory: Path, block: tuple[int, int] = (16, 24), fused: bool = False) -> dict[str, Tensor]:
    """Make a directory an FP8 one, as published ones are: all projections but the head's; returns the tensors that it stands for."""
    held = load_file(directory / SINGLE)
    if fused:
        gate_up = [torch.stack([torch.cat([held.pop(f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight") for x in ("gate", "up")])
                                for e in range(8)]) for i in range(2)]
        held.update((f"model.layers.{i}.mlp.experts.gate_up_proj", t) for i, t in enumerate(gate_up))
        down = [torch.stack([held.pop(f"model.layers.{i}.mlp.experts.{e}.down_proj.weight") for e in range(8)]) for i in range(2)]
        held.update((f"model.layers.{i}.mlp.experts.down_proj", t) for i, t in enumerate(down))
    expected = dict(held)
    for name in [n for n in held if "_proj" in n and not n.endswith("bias")]:
        *_, rows, columns = held[name].shape
        grid = (*held[name].shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        scale = 2.0 ** torch.randint(-6, 2, grid, generator=torch.Generator().manual_seed(len(name)))
        wide = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
        held[name], held[name + "_scale_inv"] = (held[name] / wide).to(FP8), scale
        expected[name] = held[name].float() * wide
    save_file(held, directory / SINGLE, metadata={"format": "pt"})
    edit_config(directory, quantization_config=dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=list(block)))
    return expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_fp8_directory_is_dequantised_on_the_way(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = quantise(write_model(tmp_path / "in", dtype=str(dtype)[6:]))
    model = ModelConfig.from_directory(tmp_path / "in")
    for parallel in (ParallelConfig(), ParallelConfig(tp=2, pp=2)):
        for rank in range(parallel.tp * parallel.pp):
            layout = mcore_layout(model, parallel, rank, parallel.tp * parallel.pp, dtype)
            tensors = empty_tensors(layout)
            read_hf(tmp_path / "in", layout, tensors, model)
            assert_same(tensors, mcore_shard({n: t.to(dtype) for n, t in expected.items()}, model, parallel, rank, parallel.tp * parallel.pp))
    # what is written again is plain: no scales, and a config that says nothing of them
    write_hf(tmp_path / "out", canonical(tmp_path / "in", dtype), model)
    assert_same(load_file(tmp_path / "out" / SINGLE), {n: t.to(dtype) for n, t in expected.items()})
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_fused_experts_in_fp8_are_read_expert_by_expert(tmp_path: Path) -> None:
    expected = quantise(write_model(tmp_path, "qwen3_moe", num_hidden_layers=2), fused=True)
    found = canonical(tmp_path)
    for i in range(2):
        p = f"model.layers.{i}.mlp.experts."
        for e in range(8):
            assert torch.equal(torch.cat([found[f"{p}{e}.gate_proj.weight"], found[f"{p}{e}.up_proj.weight"]]), expected[p + "gate_up_proj"][e])
            assert torch.equal(found[f"{p}{e}.down_proj.weight"], expected[p + "down_proj"][e])
    assert torch.equal(found["model.layers.0.mlp.gate.weight"], expected["model.layers.0.mlp.gate.weight"])


def test_fp8_codes_and_scales_can_be_taken_as_they_are_and_never_without_their_scales(tmp_path: Path) -> None:
    quantise(write_model(tmp_path))
    held, name = load_file(tmp_path / SINGLE), "model.layers.0.mlp.down_proj.weight"
    model = ModelConfig.from_directory(tmp_path)
    with HFFiles(tmp_path) as files:
        stored = files.quantised(name)
        assert stored is not None and stored.block == (16, 24) and stored.codes.dtype == FP8 == files.layout(model)[name].dtype
        assert torch.equal(stored.codes.view(torch.uint8), held[name].view(torch.uint8)) and torch.equal(stored.scales, held[name + "_scale_inv"])
        assert name + "_scale_inv" not in set(files) and files.quantised("model.norm.weight") is None
    layout = hf_layout(model, FP8)
    with pytest.raises(UserError, match="does not hold model.embed_tokens.weight, .* in FP8 as a whole"):
        read_hf(tmp_path, layout, empty_tensors(layout), model)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_codes_and_scales_pass_through_to_a_layout_that_stores_fp8(tmp_path: Path, family: str) -> None:
    """Onto two tensor-parallel ranks: bit for bit, and equal to what is dequantised on the way."""
    moe = family == "qwen3_moe"
    quantise(write_model(tmp_path, family, num_hidden_layers=2, **(dict(head_dim=16) if moe else {})), (16, 16), fused=moe)
    model = ModelConfig.from_directory(tmp_path)
    weights = fp8_weights(model)
    assert len(weights) == 2 * (4 + (24 if moe else 3))
    for rank in range(2):
        plain = mcore_layout(model, ParallelConfig(tp=2), rank, 2, torch.float32)
        layout = fp8_layout(plain, weights, (16, 16))
        stored, values = empty_tensors(layout), empty_tensors(plain)
        read_hf(tmp_path, layout, stored, model)
        read_hf(tmp_path, plain, values, model)
        assert sum(t.dtype == FP8 for t in stored.values()) == len(stored) - len(plain.tensors) > 0
        for name, tensor in values.items():
            if stored[name].dtype == FP8:
                scale = stored[name + "_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
                assert torch.equal(stored[name].float() * scale, tensor)
            else:
                assert torch.equal(stored[name], tensor)
        name = "decoder.layers.1.self_attention.linear_proj.weight"
        held = load_file(tmp_path / SINGLE)["model.layers.1.self_attn.o_proj.weight"]
        assert torch.equal(stored[name].view(torch.uint8), held.chunk(2, 1)[rank].view(torch.uint8))


def test_fp8_directories_that_do_not_fit_together_are_refused_by_name(tmp_path: Path) -> None:
    name, scale = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale_inv"
    quantise(write_model(tmp_path))
    held, config = load_file(tmp_path / SINGLE), (tmp_path / "config.json").read_text()
    for change, message in (({scale: None}, rf"{name} \[96, 64\] is stored as FP8 codes, but its scale {scale} \[6, 3\] is missing"),
                            ({scale: torch.ones(6, 1)}, rf"{scale} has shape \[6, 1\]; {name} \[96, 64\] in blocks of 16 x 24 needs \[6, 3\]"),
                            ({scale: torch.ones(6, 3, dtype=torch.int32)}, f"{scale}, the scale of {name}, has dtype I32")):
        save_file({n: t for n, t in {**held, **change}.items() if t is not None}, tmp_path / SINGLE)
        with pytest.raises(UserError, match=message):
            canonical(tmp_path)
    save_file(held, tmp_path / SINGLE)
    quantization = json.loads(config)["quantization_config"]
    for config_change, message in (
            (dict(weight_block_size=None), "FP8 with weight_block_size None"), (dict(activation_scheme="static"), "activation_scheme 'static'"),
            (dict(fmt="e5m2"), "FP8 format 'e5m2'"), (dict(weight_block_size=[128]), "must be two positive numbers"),
            *((dict(quant_method=m), f"quantization '{m}' is not supported") for m in ("mxfp4", "gptq", "awq", "compressed-tensors", "modelopt"))):
        edit_config(tmp_path, quantization_config={**quantization, **config_change})
        for read in (ModelConfig.from_directory, HFFiles):
            with pytest.raises(UserError, match=message):
                read(tmp_path)
    edit_config(tmp_path, quantization_config=dict(quant_algo="FP8", producer=dict(name="modelopt")))
    with pytest.raises(UserError, match="quantization 'modelopt FP8' is not supported; give a bf16"):
        canonical(tmp_path)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(UserError, match=r"28 tensors are FP8 \(F8_E4M3\), but config.json has no quantization_config.*contradicts the files.*_proj.weight"):
        canonical(tmp_path)


def test_a_declaration_of_fp8_that_the_files_do_not_bear_out_is_refused(tmp_path: Path) -> None:
    directory = edit_config(write_model(tmp_path), quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    with pytest.raises(UserError, match="quantization_config of block FP8, but no tensor is FP8 .*contradicts the files"):
        canonical(directory)
    edit_config(directory, quantization_config=None)
    (directory / "hf_quant_config.json").write_text(json.dumps(dict(producer=dict(name="modelopt"), quantization=dict(quant_algo="NVFP4"))))
    with pytest.raises(UserError, match="hf_quant_config.json: quantization 'modelopt NVFP4' is not supported; give a bf16"):
        canonical(directory)
    (directory / "hf_quant_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"hf_quant_config.json holds \[\]"):
        canonical(directory)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_would_lose_the_weights_are_refused_by_name(tmp_path: Path, value: float) -> None:
    """Also where codes and scales are taken as they are."""
    scale = "model.layers.1.mlp.up_proj.weight_scale_inv"
    quantise(write_model(tmp_path), (16, 16))
    held = load_file(tmp_path / SINGLE)
    held[scale][3, 2] = value
    save_file(held, tmp_path / SINGLE, metadata={"format": "pt"})
    model = ModelConfig.from_directory(tmp_path)
    stored = fp8_layout(mcore_layout(model, ParallelConfig(), 0, 1, torch.float32), fp8_weights(model), (16, 16))
    for read in (lambda: canonical(tmp_path), lambda: read_hf(tmp_path, stored, empty_tensors(stored), model)):
        with pytest.raises(UserError, match=rf"{SINGLE}: {scale} holds 1 scales that are not finite or not above zero, the first {value} at \[3, 2\]"):
            read()


def test_mxfp4_experts_are_refused_by_name_whatever_the_config_says(tmp_path: Path) -> None:
    held = load_file(write_model(tmp_path, "gpt_oss", num_hidden_layers=2) / SINGLE)
    for kind in ("gate_up_proj", "down_proj"):
        del held[f"model.layers.0.mlp.experts.{kind}"]
        held[f"model.layers.0.mlp.experts.{kind}_blocks"] = torch.zeros(8, 4, 2, 16, dtype=torch.uint8)
        held[f"model.layers.0.mlp.experts.{kind}_scales"] = torch.zeros(8, 4, 2, dtype=torch.uint8)
    save_file(held, tmp_path / SINGLE)
    with pytest.raises(UserError, match=r"in MXFP4 \(model.layers.0.mlp.experts.(gate_up|down)_proj_blocks.*dequantise it to bf16 first"):
        canonical(tmp_path)


# ------------------------------------------------------------------------------------------------ what is not whole
def test_half_written_directories_are_refused(tmp_path: Path) -> None:
    weight_map = shard(write_model(tmp_path, "qwen2"))
    files = sorted(set(weight_map.values()))
    held = {file: (tmp_path / file).read_bytes() for file in files}
    expected = canonical(tmp_path)
    assert set(expected) == set(weight_map)

    (tmp_path / files[1]).unlink()
    with pytest.raises(UserError, match=f"lacks the shards {files[1]} that"):
        canonical(tmp_path)
    for kept in (100, len(held[files[1]]) - 1):
        (tmp_path / files[1]).write_bytes(held[files[1]][:kept])
        with pytest.raises(UserError, match=f"{files[1]} (is cut short|cannot be read).*download it again"):
            canonical(tmp_path)
    (tmp_path / files[1]).write_bytes(held[files[0]])
    with pytest.raises(UserError, match=r"shards lack \d+ tensors that .* places in them: .*; download them again"):
        canonical(tmp_path)
    (tmp_path / files[1]).write_bytes(held[files[1]])

    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {n: f for n, f in weight_map.items() if n != "model.norm.weight"}}))
    with pytest.raises(UserError, match=r"shards hold 1 tensors that .* does not place in them: model.norm.weight"):
        canonical(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    index = (tmp_path / INDEX).read_bytes()
    for content, message in ((json.dumps({"weight_map": {**weight_map, "model.norm.weight": 3}}).encode(), "weight_map says 3 of model.norm.weight; it must be"),
                             (json.dumps({"weight_map": {**weight_map, "model.norm.weight": ["a"]}}).encode(), r"weight_map says \['a'\] of model.norm.weight"),
                             (b'{"weight_map": []}', "has no weight_map"), (b"[]", "has no weight_map"), (b"\xff" + index, "is not valid JSON: 'utf-8' codec")):
        (tmp_path / INDEX).write_bytes(content)
        with pytest.raises(UserError, match=f"{INDEX}.* {message}"):
            canonical(tmp_path)
    (tmp_path / INDEX).write_bytes(index)
    (tmp_path / INDEX).rename(tmp_path / "away")
    with pytest.raises(UserError, match=f"holds 3 safetensors files .* and no {INDEX}"):
        canonical(tmp_path)
    (tmp_path / "away").rename(tmp_path / INDEX)

    for leftover in ("model-00002-of-00003.safetensors.incomplete", "x.tmp", ".cache/huggingface/download/abc.incomplete"):
        (tmp_path / leftover).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / leftover).touch()
        with pytest.raises(UserError, match=f"is not complete: it holds {Path(leftover).name}"):
            canonical(tmp_path)
        (tmp_path / leftover).unlink()
    (tmp_path / SINGLE).write_bytes(held[files[0]])
    with pytest.raises(UserError, match=f"holds {SINGLE} beside {INDEX}"):
        canonical(tmp_path)
    (tmp_path / SINGLE).unlink()
    assert_same(canonical(tmp_path), expected)


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    raw = (tmp_path / SINGLE).read_bytes()
    for damaged in (b"", raw[:5], (1 << 60).to_bytes(8, "little") + raw[8:], raw[:8] + b"x" + raw[9:], raw.replace(b'"shape":[203', b'"shape":[204')):
        (tmp_path / SINGLE).write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read as safetensors"):
            canonical(tmp_path)


@pytest.mark.parametrize("family, changes, message", [
    ("qwen3_moe", dict(num_experts=6), "does not have: .*experts.6.*; the files hold 8 experts, config.json says 6"),
    ("qwen3_moe", dict(num_experts=12), "lacks .*experts.8.*; the files hold 8 experts, config.json says 12"),
    ("qwen3_moe", dict(moe_intermediate_size=16), r"gate_proj.weight has shape \(32, 64\), config.json asks for \(16, 64\)"),
    ("llama", dict(num_hidden_layers=3), "does not have: model.layers.3.*; the files hold 4 layers, config.json says 3"),
    ("llama", dict(num_hidden_layers=5), "lacks .*model.layers.4.*; the files hold 4 layers, config.json says 5"),
    ("qwen3", dict(model_type="qwen2"), "lacks 12 tensors .*q_proj.bias"),
    ("deepseek_v3", dict(first_k_dense_replace=0), "lacks .*model.layers.0.mlp.gate.weight"),
])
def test_a_config_that_contradicts_the_files_is_named(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    edit_config(write_model(tmp_path, family), **changes)
    with pytest.raises(UserError, match=message):
        canonical(tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_for_multi_token_prediction_are_refused_or_left_out_on_demand(tmp_path: Path, family: str,
                                                                             caplog: pytest.LogCaptureFixture) -> None:
    held = load_file(write_model(tmp_path / "in", family, num_hidden_layers=2, dtype="bfloat16") / SINGLE)
    more = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in held.items() if "layers.1." in n}
    more.update({f"model.layers.2.{n}": torch.ones(64) for n in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")})
    save_file({**held, **more}, tmp_path / "in" / SINGLE)
    with pytest.raises(UserError, match="does not have: model.layers.2"):  # the config knows of none
        canonical(tmp_path / "in", without_mtp=True)
    edit_config(tmp_path / "in", num_nextn_predict_layers=1)
    with pytest.raises(UserError, match=r"multi-token prediction \(model.layers.2.\*; num_nextn_predict_layers 1\).*--without-mtp"):
        canonical(tmp_path / "in")
    with caplog.at_level(logging.WARNING):
        found = canonical(tmp_path / "in", torch.bfloat16, without_mtp=True)
    assert f"(model.layers.2.*, {len(more)} tensors) are left out" in caplog.text
    assert_same(found, held)
    write_hf(tmp_path / "out", found, ModelConfig.from_directory(tmp_path / "in"))
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert_same(canonical(tmp_path / "out", torch.bfloat16), held)
