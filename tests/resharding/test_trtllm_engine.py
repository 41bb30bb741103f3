"""The classic engine layout is what Megatron-Core's own export gives, and its directory is complete and readable or absent."""

from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.hf_files import HFFiles
from checkpoint.trtllm_engine import EngineWriter, engine_config, verify_engine, write_engine
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig, RopeScaling, Yarn
from resharding.errors import CoverageError, WeightsError
from resharding.layout import canonical_shapes, empty_tensors
from resharding.layouts import hf_layout
from resharding.layouts.trtllm_engine import EngineMapping, trtllm_engine_layout
from resharding.plan import make_plan
from tests.resharding.direct import Tensors, assert_same, canonical_tensors, engine_shard, hf_files, mcore_shard, pad_rows, simulate, tiny

F32 = torch.float32


def filled(model: ModelConfig, full: Tensors, tp: int, pp: int, dtype: torch.dtype = torch.float32, **options: int) -> list[Tensors]:
    layouts = [trtllm_engine_layout(model, tp, pp, r, dtype, **options) for r in range(tp * pp)]
    held = {x.rank: {n: t.fill_(float("nan")) for n, t in empty_tensors(x).items()} for x in layouts}
    simulate(make_plan([hf_layout(model, torch.float32, experts="split")], layouts, canonical_shapes(model)), {0: full}, held)
    return [held[r] for r in range(tp * pp)]


def stacked_layers(model: ModelConfig, full: Tensors) -> Tensors:
    """Megatron's own tensors of one rank, as its converter takes them: one tensor for all layers (and for all experts of a layer)."""
    out: Tensors = {}
    found: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name, tensor in mcore_shard(full, model, ParallelConfig(), 0, 1).items():
        words = name.split(".")
        if words[:2] != ["decoder", "layers"]:
            out[name] = tensor
            continue
        layer, expert = int(words[2]), int(words[6]) if "local_experts" in words else 0
        rest = ["mlp", "experts", "experts", *words[7:]] if "local_experts" in words else words[3:]
        found.setdefault(".".join(["decoder", "layers", *rest]), {})[layer, expert] = tensor
    for name, parts in found.items():
        layers = [[t for (i, _), t in sorted(parts.items()) if i == layer] for layer in range(model.num_layers)]
        out[name] = torch.stack([torch.stack(x) if "experts" in name else x[0] for x in layers])
    return out


def megatrons_export(model: ModelConfig, full: Tensors, tp: int, pp: int, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32",
                     parallel_embedding: bool = False) -> list[Tensors]:
    """What megatron.core.export.trtllm's single-device converter gives for every rank; two functions of tensorrt_llm stand in.

    It does not pad an odd head itself (TensorRT-LLM's own converters do), so it gets a padded one, as Megatron holds it.
    """
    utils = types.ModuleType("tensorrt_llm._utils")
    utils.pad_vocab_size = lambda size, tp: math.ceil(size / tp) * tp  # type: ignore[attr-defined]
    utils.str_dtype_to_torch = lambda name: getattr(torch, name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", types.ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", utils)
    from megatron.core.export.data_type import DataType
    from megatron.core.export.export_config import ExportConfig
    from megatron.core.export.trtllm.model_to_trllm_mapping.default_conversion_dict import DEFAULT_CONVERSION_DICT
    from megatron.core.export.trtllm.trtllm_weights_converter.single_device_trtllm_model_weights_converter import (
        SingleDeviceTRTLLMModelWeightsConverter,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=model.num_layers, num_attention_heads=model.num_heads, num_query_groups=model.num_kv_heads,
                               kv_channels=model.head_dim, hidden_size=model.hidden_size, ffn_hidden_size=model.intermediate_size,
                               gated_linear_unit=True, normalization="RMSNorm", add_bias_linear=False)
    converter = SingleDeviceTRTLLMModelWeightsConverter(ExportConfig(tp, pp, parallel_embedding), config, DataType[dtype], activation="swiglu")
    state = stacked_layers(model.with_options(make_vocab_size_divisible_by=1), full)
    state["output_layer.weight"] = pad_rows(state["output_layer.weight"], math.ceil(model.vocab_size / tp) * tp)
    converter.convert(state, DEFAULT_CONVERSION_DICT, state_dict_split_by_layer_numbers=False)
    per_stage = model.num_layers // pp
    return [converter.get_local_model_weights_per_gpu(SimpleNamespace(
        tp_size=tp, tp_rank=t, pp_layers=lambda n, p=p: list(range(p * per_stage, (p + 1) * per_stage)),
        is_first_pp_rank=lambda p=p: p == 0, is_last_pp_rank=lambda p=p: p == pp - 1), SimpleNamespace())
        for p in range(pp) for t in range(tp)]


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("family, kv_heads", [("llama", 2), ("llama", 1), ("llama", 4), ("mixtral", 2)])
def test_every_rank_equals_megatrons_own_export(family: str, kv_heads: int, tp: int, pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with fewer key/value heads than ranks and 13 words of vocabulary; upstream cuts experts by tp only."""
    model = tiny(family, num_kv_heads=kv_heads, head_dim=6)
    full = canonical_tensors(model)
    for found, expected in zip(filled(model, full, tp, pp), megatrons_export(model, full, tp, pp, monkeypatch), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_parallel_embedding_is_cut_by_rows_as_in_megatrons_export(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    full = canonical_tensors(model)
    exported = megatrons_export(model, full, tp, 1, monkeypatch, parallel_embedding=True)
    for found, expected in zip(filled(model, full, tp, 1, parallel_embedding=True), exported, strict=True):
        assert_same(found, expected)


def test_in_bfloat16_only_the_router_differs_from_megatrons_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM's own converters keep it in float32 (layers/moe.py: strict_dtype); Megatron's casts it like the rest."""
    model = tiny("mixtral")
    full = canonical_tensors(model)
    for found, expected in zip(filled(model, full, 2, 1, torch.bfloat16), megatrons_export(model, full, 2, 1, monkeypatch, "bfloat16"), strict=True):
        routers = [name for name in found if name.endswith("mlp.router.weight")]
        assert len(routers) == model.num_layers and all(found[name].dtype == torch.float32 for name in routers)
        assert_same({**found, **{name: found[name].bfloat16() for name in routers}}, expected)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_families_that_the_format_does_not_know_are_refused_by_name(family: str) -> None:
    with pytest.raises(UserError, match=f"a {family} model cannot be written as a classic TensorRT-LLM checkpoint: .*qwen3_moe"):
        trtllm_engine_layout(tiny(family), 1, 1, 0, F32)


@pytest.mark.parametrize("model, sizes, message", [
    (tiny("qwen3_moe", moe_layers=[0, 2]), {}, "experts in every layer or in none.* none in 1, 3"),
    (tiny(num_layers=3), dict(pp=2), "pp=2 does not divide the 3 layers"),
    (tiny(num_heads=6, num_kv_heads=3), dict(tp=2), "tp=2 does not divide num_key_value_heads 3"),
    (tiny(intermediate_size=6), dict(tp=4), "tp=4 does not divide the rows of model.layers.0.mlp.gate_proj.weight: 6"),
    (tiny("mixtral"), dict(tp=2, moe_tp=2, moe_ep=2), "moe_tp 2 x moe_ep 2 is not tp 2"),
    (tiny("mixtral"), dict(tp=3, moe_ep=3), "moe_ep=3 must divide the 4 experts"),
    (tiny("llama", qkv_bias=True, o_bias=True), {}, "no place for model.layers.0.self_attn.o_proj.bias of a llama model"),
])
def test_what_the_format_cannot_hold_is_refused(model: ModelConfig, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trtllm_engine_layout(model, **{"tp": 1, "pp": 1, **sizes}, rank=0, dtype=F32)


def written(directory: Path, family: str, mapping: EngineMapping, **options: bool) -> tuple[ModelConfig, Tensors]:
    """An engine checkpoint of a model whose experts are in one tensor in the source, as transformers 5 may hold them."""
    model = tiny(family, tied=family == "qwen2")
    full = canonical_tensors(model)
    write_engine(directory, hf_files(full, model, "fused"), hf_layout(model, F32, experts="fused"), model, mapping, torch.bfloat16, **options)
    return model, full


@pytest.mark.parametrize("family, mapping", [
    ("llama", EngineMapping(tp=2, pp=2)), ("qwen2", EngineMapping(tp=4)), ("qwen3", EngineMapping(pp=4, parallel_embedding=True)),
    ("qwen2_moe", EngineMapping(tp=4, moe_ep=2)), ("qwen3_moe", EngineMapping(tp=2, moe_ep=2, pp=2)), ("mixtral", EngineMapping(tp=4)),
])
def test_the_directory_holds_every_rank_and_reads_back(tmp_path: Path, family: str, mapping: EngineMapping) -> None:
    model, full = written(tmp_path / "engine", family, mapping)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine"]
    files = ["config.json", *(f"rank{rank}.safetensors" for rank in range(mapping.world_size))]
    assert sorted(p.name for p in (tmp_path / "engine").iterdir()) == files
    for rank in range(mapping.world_size):
        expected = engine_shard(full, model, mapping.tp, mapping.pp, rank, torch.bfloat16, moe_ep=mapping.expert_ep,
                                parallel_embedding=mapping.parallel_embedding)
        assert_same(load_file(tmp_path / "engine" / f"rank{rank}.safetensors"), expected)
    verify_engine(tmp_path / "engine", full, hf_layout(model, F32, experts="split"), model, mapping, torch.bfloat16)


def test_files_become_a_checkpoint_without_ranks(tmp_path: Path) -> None:
    """Mixtral in two shards of bfloat16 as published, read through the files' own layout."""
    config = dict(model_type="mixtral", hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  vocab_size=13, num_local_experts=4, rms_norm_eps=1e-5, rope_theta=1e6, dtype="bfloat16")
    model = ModelConfig.from_hf(config)
    full = canonical_tensors(model, torch.bfloat16)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    weight_map = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(full)}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file in set(weight_map.values()):
        save_file({name: t for name, t in full.items() if weight_map[name] == file}, tmp_path / "hf" / file)
    told: list[tuple[int, int]] = []
    with HFFiles(tmp_path / "hf") as files:
        write_engine(tmp_path / "engine", files, files.check(model), model, EngineMapping(tp=2), torch.bfloat16, report=lambda *at: told.append(at))
        verify_engine(tmp_path / "engine", files, files.check(model), model, EngineMapping(tp=2), torch.bfloat16)
    for rank in range(2):
        assert_same(load_file(tmp_path / "engine" / f"rank{rank}.safetensors"), engine_shard(full, model, 2, 1, rank, torch.bfloat16))
    assert told == sorted(told) and told[-1][0] == told[-1][1]


def test_the_config_says_what_the_builder_reads(tmp_path: Path) -> None:
    written(tmp_path / "engine", "qwen2_moe", EngineMapping(tp=4, pp=2, moe_ep=2))
    found = json.loads((tmp_path / "engine/config.json").read_text())
    assert found == {
        "architecture": "Qwen2MoeForCausalLM", "dtype": "bfloat16", "logits_dtype": "float32", "vocab_size": 13, "max_position_embeddings": 32,
        "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 2,
        "qk_layernorm": False, "hidden_act": "swiglu", "norm_epsilon": 1e-6, "position_embedding_type": "rope_gpt_neox", "rotary_base": 10000.0,
        "rotary_scaling": None, "attn_bias": True, "mlp_bias": False, "use_parallel_embedding": False, "embedding_sharding_dim": 0,
        "share_embedding_table": False, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": 8, "tp_size": 4, "pp_size": 2, "moe_tp_size": 2, "moe_ep_size": 2}, "qwen_type": "qwen2_moe",
        "seq_length": 8192, "use_logn_attn": False, "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 12,
        "moe": {"num_experts": 4, "top_k": 2, "normalization_mode": 1, "sparse_mixer_epsilon": 0.01, "tp_mode": 0,
                "shared_expert_intermediate_size": 12}}
    llama3 = tiny(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), rope_theta=5e5)
    rope = engine_config(llama3, EngineMapping(), torch.float16)
    assert rope["rotary_base"] == 5e5 and rope["rotary_scaling"]["type"] == "llama3" and rope["rotary_scaling"]["factor"] == 8.0
    with pytest.raises(UserError, match="rope scaling yarn"):
        engine_config(tiny(rope_scaling=Yarn(4.0, 64)), EngineMapping(), torch.float16)
    with pytest.raises(UserError, match="float8_e4m3fn is not supported; supported: bfloat16"):
        engine_config(tiny(), EngineMapping(), torch.float8_e4m3fn)


def test_a_directory_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    model = tiny()
    unfinished = EngineWriter(tmp_path / "engine", model, EngineMapping(tp=2), F32)
    with pytest.raises(WeightsError, match=r"30 tensors are missing: transformer.vocab_embedding.weight \(rank 1\)"), unfinished as writer:
        for name, tensor in engine_shard(canonical_tensors(model), model, 2, 1, 0).items():
            writer.write(0, name, tensor)
        for name, message in (("lm_head.weight", "lm_head.weight is written already"), ("lm_head", "lm_head is no tensor of the checkpoint")):
            with pytest.raises(WeightsError, match=message):
                writer.write(0, name, torch.zeros(7, 8))
        for wrong in (torch.zeros(6, 8), torch.zeros(7, 8, dtype=torch.float16)):
            with pytest.raises(WeightsError, match=r"rank 1: lm_head.weight is .*the checkpoint has \(7, 8\) torch.float32"):
                writer.write(1, "lm_head.weight", wrong)
        writer.write(1, "lm_head.weight", torch.zeros(5, 8), 0)
        with pytest.raises(WeightsError, match="lm_head.weight is written already"):
            writer.write(1, "lm_head.weight", torch.zeros(2, 8), 4)
        writer.write(1, "lm_head.weight", torch.zeros(2, 8), 5)
    with pytest.raises(KeyboardInterrupt), EngineWriter(tmp_path / "engine", model, EngineMapping(), F32):
        raise KeyboardInterrupt
    with pytest.raises(CoverageError, match="model.norm.weight"):
        files = hf_layout(model, F32)
        part = replace(files, tensors=tuple(t for t in files.tensors if t.name != "model.norm.weight"))
        write_engine(tmp_path / "engine", canonical_tensors(model), part, model, EngineMapping(), F32)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_on_request_and_only_where_it_is_such_a_checkpoint(tmp_path: Path) -> None:
    written(tmp_path / "engine", "llama", EngineMapping(tp=2))
    with pytest.raises(UserError, match="is not empty"):
        written(tmp_path / "engine", "llama", EngineMapping())
    assert (tmp_path / "engine/rank1.safetensors").exists()
    written(tmp_path / "engine", "llama", EngineMapping(), overwrite=True)
    assert sorted(p.name for p in (tmp_path / "engine").iterdir()) == ["config.json", "rank0.safetensors"]
    (tmp_path / "engine/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds thesis.tex, not part of a TensorRT-LLM checkpoint"):
        written(tmp_path / "engine", "llama", EngineMapping(), overwrite=True)
    with pytest.raises(UserError, match="thesis.tex' is a file"):
        written(tmp_path / "engine/thesis.tex/engine", "llama", EngineMapping())
    assert (tmp_path / "engine/thesis.tex").exists() and [p.name for p in tmp_path.iterdir()] == ["engine"]


def test_verification_finds_one_changed_byte_and_a_foreign_config(tmp_path: Path) -> None:
    directory, mapping = tmp_path / "engine", EngineMapping(tp=2)
    model, full = written(directory, "mixtral", mapping)
    check = partial(verify_engine, directory, full, hf_layout(model, F32, experts="split"), model, mapping, torch.bfloat16)
    check()
    file = directory / "rank1.safetensors"
    kept = file.read_bytes()
    file.write_bytes(kept[:-7] + bytes([kept[-7] ^ 1]) + kept[-6:])
    with pytest.raises(WeightsError, match=r"of rank 1 is not what was written"):
        check()
    file.write_bytes(kept)
    check()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rotary_base": 500000.0}))
    with pytest.raises(WeightsError, match="config.json is not that of the model"):
        check()
