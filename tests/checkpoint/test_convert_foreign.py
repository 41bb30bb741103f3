"""Directories of Megatron-LM and Megatron-Bridge, read and written."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from checkpoint import megatron_lm
from checkpoint.convert import open_model, verify
from checkpoint.megatron_args import model_of
from checkpoint.torch_dist import TorchDistFiles
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from tests.checkpoint.built import megatrons_save
from tests.checkpoint.conversion import store, to_hf, to_mcore
from tests.models import FAMILY_TINY, write_model
from tests.worker_pool import run_ranks

# Megatron-LM's arguments of these models, as its arguments.py names them
LM: dict[str, dict[str, Any]] = {
    "llama": dict(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, group_query_attention=True, num_query_groups=2,
                  kv_channels=16, norm_epsilon=1e-5, rotary_base=10000, untie_embeddings_and_output_weights=False, add_qkv_bias=False,
                  qk_layernorm=False, num_experts=None),
    "qwen3_moe": dict(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, group_query_attention=True, num_query_groups=2,
                      kv_channels=24, norm_epsilon=1e-5, rotary_base=10000, untie_embeddings_and_output_weights=True, add_qkv_bias=False,
                      qk_layernorm=True, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=32, moe_layer_freq=1,
                      moe_router_pre_softmax=False, moe_router_score_function="softmax", moe_shared_expert_intermediate_size=None),
    "deepseek_v3": dict(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, group_query_attention=False, num_query_groups=1,
                        kv_channels=16, norm_epsilon=1e-5, rotary_base=10000, untie_embeddings_and_output_weights=True, qk_layernorm=True,
                        multi_latent_attention=True, q_lora_rank=32, kv_lora_rank=24, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12,
                        rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
                        mscale=1.0, mscale_all_dim=1.0, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=32, moe_layer_freq=[0, 1],
                        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_num_groups=4, moe_router_group_topk=2,
                        moe_router_topk_scaling_factor=2.5, moe_shared_expert_intermediate_size=64),
}
COMMON: dict[str, Any] = dict(swiglu=True, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False, vocab_size=203,
                              padded_vocab_size=256, max_position_embeddings=256, seq_length=128, make_vocab_size_divisible_by=128, bf16=True,
                              init_method_std=0.2, use_rope_scaling=False, rank=0, params_dtype=torch.bfloat16)


class Unknown:
    """Stands for the enumerations and objects of Megatron-LM that a reader does not have."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.fixture(scope="module")
def runs(sources: dict[str, Path], tmp_path_factory: Any) -> dict[str, Path]:
    """What Megatron-LM leaves: weights that Megatron saved from its local spec, an optimizer's state among them, and the run's arguments."""
    root: Path = tmp_path_factory.mktemp("runs")
    run_ranks(1, megatrons_save, [(str(sources[f]), str(root / f / "saved")) for f in LM])
    for family, arguments in LM.items():
        saved, weights = root / family / "saved", root / family / "iter_0000123"
        if family == "llama":  # Megatron's own files as they are
            saved.rename(weights)
        else:  # the same tensors with a run's optimizer beside them
            with TorchDistFiles(saved) as files:
                held = {key: t[tuple(slice(0, n) for n in t.shape)].clone() for key, t in files.items()}
            store(weights, {**held, **{"optimizer.state.exp_avg." + key: t.float() for key, t in held.items()}})
            shutil.rmtree(saved)
        torch.save({"args": argparse.Namespace(**COMMON, **arguments, attention_backend=Unknown(3)), "checkpoint_version": 3.0, "iteration": 123,
                    "opt_param_scheduler": {"max_lr": 1.0}}, weights / "common.pt")
        (root / family / "latest_checkpointed_iteration.txt").write_text("123")
    return {family: root / family for family in LM}


@pytest.mark.parametrize("family", LM)
def test_a_run_of_megatron_lm_is_read(family: str, sources: dict[str, Path], runs: dict[str, Path], tmp_path: Path) -> None:
    with open_model("mcore", runs[family]) as opened, open_model("hf", sources[family]) as source:
        assert opened.model.with_options(bos_token_id=1, eos_token_ids=(2,)) == source.model  # from the arguments alone
        verify(source, opened)
    with open_model("mcore", runs[family] / "iter_0000123", hf_config=sources[family]) as opened:
        assert opened.model == ModelConfig.from_directory(sources[family])


def test_megatron_lm_directories_that_are_not_whole_are_refused(sources: dict[str, Path], runs: dict[str, Path], tmp_path: Path) -> None:
    root = shutil.copytree(runs["llama"], tmp_path / "run")
    other = write_model(tmp_path / "other", "llama", num_hidden_layers=3, tie_word_embeddings=True)
    with pytest.raises(UserError, match="num_layers is 2 in the checkpoint and 3 in config.json"):
        to_hf(root, tmp_path / "out", hf_config=other)
    tracker = root / megatron_lm.TRACKER
    tracker.write_text("124")
    with pytest.raises(UserError, match="names iter_0000124, which is not in .*; it holds iter_0000123"):
        to_hf(root, tmp_path / "out")
    tracker.write_text("soon")
    with pytest.raises(UserError, match="holds 'soon'"):
        to_hf(root, tmp_path / "out")
    tracker.write_bytes(b"\xff12")
    with pytest.raises(UserError, match=f"{megatron_lm.TRACKER} is not text .*must hold a number or 'release'"):
        to_hf(root, tmp_path / "out")
    tracker.unlink()
    with pytest.raises(UserError, match="holds iter_0000123 and no latest_checkpointed_iteration.txt"):
        to_hf(root, tmp_path / "out")
    tracker.write_text("123")
    common = torch.load(root / "iter_0000123/common.pt", weights_only=False)
    for config in (None, sources["llama"]):
        for name, value, words in (("num_layers", "x", "num_layers is 'x'; it must be a whole number"), ("rotary_base", [1], r"rotary_base is \[1\]")):
            wrong = {**common, "args": argparse.Namespace(**{**vars(common["args"]), name: value})}
            torch.save(wrong, root / "iter_0000123/common.pt")
            with pytest.raises(UserError, match=rf"the arguments in .*common.pt: {words}"):
                to_hf(root, tmp_path / "out", hf_config=config)
    torch.save({**common, "args": argparse.Namespace(**{**vars(common["args"]), "ffn_hidden_size": 95})}, root / "iter_0000123/common.pt")
    with pytest.raises(UserError, match=r"common.pt asks for \(2, 190, 64\)"):
        to_hf(root, tmp_path / "out")
    torch.save({"iteration": 123}, root / "iter_0000123/common.pt")
    with pytest.raises(UserError, match="does not say which model it is .*--hf-config DIR"):
        to_hf(root, tmp_path / "out")
    (root / "iter_0000123/mp_rank_00").mkdir()
    with pytest.raises(UserError, match="`torch` format .*--ckpt-format torch_dist"):
        to_hf(root, tmp_path / "out")
    with pytest.raises(UserError, match="is no model in Megatron's format"):
        to_hf(sources["llama"], tmp_path / "out")
    with pytest.raises(UserError, match="does not exist"):
        to_hf(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(UserError, match="x do not say 'hidden_size'"):
        model_of({"num_layers": 2, "num_attention_heads": 2}, "x")
