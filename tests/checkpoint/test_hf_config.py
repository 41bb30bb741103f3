"""`config.json` as it is written: what was read, in the words of old and new readers, and enough for transformers to build the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.hf import SINGLE, HFFiles, HFWriter, write_hf
from checkpoint.hf_config import hf_config
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from tests.models import FAMILY_TINY, LLAMA3_ROPE, TINY, YARN, write_model
from tests.resharding.direct import assert_same

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILY_TINY),
    ("llama", dict(rope_parameters=LLAMA3_ROPE, max_position_embeddings=512, head_dim=32, tie_word_embeddings=True)),
    ("llama", dict(rope_parameters=YARN)), ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    ("qwen3", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)), ("mistral", dict(sliding_window=None)),
    ("qwen3_moe", dict(use_sliding_window=True, sliding_window=5, decoder_sparse_step=2)),
    ("deepseek_v2", dict(q_lora_rank=None, topk_method="group_limited_greedy", n_group=4, topk_group=2)),
    ("gpt_oss", dict(layer_types=["full_attention", "sliding_attention"])), ("mixtral", dict(sliding_window=5)),
]


@pytest.mark.parametrize("family, changes", VARIANTS, ids=lambda v: v if isinstance(v, str) else ",".join(v) or "tiny")
def test_what_is_written_again_is_the_same_model_to_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """With the config that was read, and with one made from the sizes that the model knows: the same bytes, keys and logits."""
    write_model(tmp_path / "in", family, **{"num_hidden_layers": 2, **changes})
    model, held = ModelConfig.from_directory(tmp_path / "in"), load_file(tmp_path / "in" / SINGLE)
    bare = model.with_options(hf={})
    with HFFiles(tmp_path / "in") as files:
        layout = files.check(model)
        for name, config in (("out", model), ("bare", bare)):
            with HFWriter(tmp_path / name, layout, config, torch.float32) as writer:
                for local in layout.tensors:
                    writer.write(local.name, files[local.name])
            assert_same(load_file(tmp_path / name / SINGLE), held)
            assert ModelConfig.from_directory(tmp_path / name) == model
    before, after = ({**AutoConfig.from_pretrained(tmp_path / d).to_dict(), "_name_or_path": ""} for d in ("in", "out"))
    assert after == before
    (a, _), (b, info) = (AutoModelForCausalLM.from_pretrained(tmp_path / d, dtype=torch.float32, output_loading_info=True) for d in ("in", "bare"))
    assert not any(info.values())
    ids = torch.arange(3, 70)[None]
    with torch.no_grad():
        torch.testing.assert_close(a(ids).logits, b(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family, changes", VARIANTS, ids=lambda v: v if isinstance(v, str) else ",".join(v) or "tiny")
def test_readers_of_the_older_keys_alone_see_the_same_model(family: str, changes: dict[str, Any]) -> None:
    model = ModelConfig.from_hf(AutoConfig.for_model(family, **{"num_hidden_layers": 2, **FAMILY_TINY[family], **changes}).to_dict())
    old = {k: v for k, v in hf_config(model.with_options(hf={}), "float32").items() if k not in ("rope_parameters", "dtype")}
    assert ModelConfig.from_hf(old) == model.with_options(dtype="float32")


@pytest.mark.parametrize("given", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
                                   {"rope_theta": 1000000}, {"rope_theta": 1e6, "rope_scaling": None}])
def test_an_exported_config_gives_the_rotary_base_to_old_and_new_readers(tmp_path: Path, given: dict[str, Any]) -> None:
    data = json.loads((write_model(tmp_path / "in", "qwen3") / "config.json").read_text())
    data.pop("rope_parameters", None)
    (tmp_path / "in/config.json").write_text(json.dumps({**data, **given}))
    model = ModelConfig.from_directory(tmp_path / "in")
    assert model.rope_theta == 1e6 and isinstance(model.rope_theta, float)
    write_hf(tmp_path / "out", {n: t.bfloat16() for n, t in load_file(tmp_path / "in" / SINGLE).items()}, model)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["rope_theta"] == 1e6
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters["rope_theta"] == 1e6 and config.dtype == torch.bfloat16
    assert ModelConfig.from_directory(tmp_path / "out") == model.with_options(dtype="bfloat16")


def test_a_rotary_base_given_twice_or_not_at_all_is_not_guessed_silently(caplog: pytest.LogCaptureFixture) -> None:
    data = {k: v for k, v in AutoConfig.for_model("qwen3", num_hidden_layers=2).to_dict().items() if k != "rope_parameters"}
    with pytest.raises(UserError, match=r"rope_theta 10000.0 and rope_parameters.rope_theta 1000000.0"):
        ModelConfig.from_hf({**data, "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert ModelConfig.from_hf(data).rope_theta == 10000.0 and "gives no rope_theta" in caplog.text


@pytest.mark.parametrize("quantised", [False, True])
def test_quantization_config_stays_only_with_quantised_files(quantised: bool) -> None:
    hf = AutoConfig.for_model("llama", num_hidden_layers=2).to_dict()
    hf["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert ("quantization_config" in hf_config(ModelConfig.from_hf(hf), "bfloat16", quantised)) == quantised


@pytest.mark.parametrize("family, changes", [("llama", {}), ("qwen3", {}),
                                             ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1))])
def test_a_model_that_was_changed_after_reading_is_written_as_it_is(family: str, changes: dict[str, Any]) -> None:
    model = ModelConfig.from_hf(AutoConfig.for_model(family, **{**TINY, **changes}).to_dict())
    changed = model.with_options(num_layers=3, vocab_size=77, rope_theta=5e5, windowed_layers=tuple(i for i in model.windowed_layers if i < 3))
    written = hf_config(changed, "float32")
    assert ModelConfig.from_hf(written) == changed.with_options(dtype="float32")
    config = AutoConfig.for_model(**written)
    assert (config.num_hidden_layers, config.vocab_size, config.rope_parameters["rope_theta"]) == (3, 77, 5e5)
    assert len(getattr(config, "layer_types", None) or [0, 0, 0]) == 3
