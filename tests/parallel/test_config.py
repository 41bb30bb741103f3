"""Parallel sizes are checked before anything is built, with a message that has the numbers; model configs are read as transformers does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig, Yarn
from tests.models import FAMILY_TINY, TINY
from tests.worker_pool import run_ranks

LLAMA = {"model_type": "llama", **TINY}


def model(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(("world", "parallel", "words"), [
    (6, dict(tp=2, pp=2), ["4", "6", "8"]),
    (4, dict(tp=8), ["tp=8", "4"]),
    (8, dict(tp=3), ["3", "8"]),
    (8, dict(tp=8), ["tp=8", "num_attention_heads 4"]),
    (3, dict(pp=3), ["4 layers", "3"]),
    (8, dict(tp=4, ep=4), ["etp", "defaults to tp"]),
    (2, dict(ep=2), ["no experts"]),
    (2, dict(cp=4), ["cp=4", "world of 2"]),
    (6, dict(cp=2, tp=2), ["cp 2 = 4", "start 4 or 8"]),
    (2, dict(pp=2, first_stage_layers=5), ["4 layers", "first_stage_layers"]),
    (2, dict(pp=2, pipeline_layout="Et|ttL"), ["3 layers", "the model has 4"]),
])
def test_sizes_that_do_not_fit_are_refused(world: int, parallel: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        ParallelConfig(**parallel).validate(world, model())
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("family", "changes", "world", "parallel", "words"), [
    ("deepseek_v3", {}, 2, dict(tp=2), ["latent attention", "sequence_parallel=true"]),
    ("qwen3_moe", {}, 2, dict(tp=2), ["experts", "sequence_parallel=true"]),
    ("gpt_oss", {}, 2, dict(tp=2, sequence_parallel=True), ["etp=2", "biases", "set etp=1"]),
    ("mixtral", {}, 8, dict(ep=8), ["ep=8", "4 experts"]),
    ("deepseek_v3", dict(q_lora_rank=33), 2, dict(tp=2, sequence_parallel=True), ["q_lora_rank 33"]),
])
def test_sizes_that_do_not_fit_experts_and_latent_attention_are_refused(family: str, changes: dict[str, Any], world: int, parallel: dict[str, Any],
                                                                         words: list[str]) -> None:
    c = ModelConfig.from_hf({"model_type": family, **TINY, **FAMILY_TINY[family], **changes})
    with pytest.raises(UserError) as error:
        ParallelConfig(**parallel).validate(world, c)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("bad", [dict(tp=0), dict(tp="2"), dict(pp=1, vpp=2), dict(sequence_parallel=True), dict(tp=True)])
def test_sizes_that_mean_nothing_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ParallelConfig(**bad)


def test_coordinates_and_ranks_are_inverse() -> None:
    p = ParallelConfig(tp=2, pp=2)
    assert p.dp(12) == 3
    assert [p.rank_of(p.coordinates(r, 12), 12) for r in range(12)] == list(range(12))


@pytest.mark.parametrize(("changes", "theta"), [
    (dict(rope_theta=1e6), 1e6), (dict(rope_theta=1000000), 1e6), (dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)), 1e6),
    ({}, 1e4), (dict(rope_theta=1e6, rope_scaling=None), 1e6)])
def test_rotary_base_is_read_from_either_place(changes: dict[str, Any], theta: float) -> None:
    assert model(**changes).rope_theta == theta


def test_two_rotary_bases_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="10000.*1000000|1000000.*10000"):
        model(rope_theta=1e4, rope_parameters=dict(rope_type="default", rope_theta=1e6))


@pytest.mark.parametrize(("changes", "word"), [
    (dict(model_type="mamba"), "llama, mistral"), (dict(model_type="deepseek_v2", topk_method="best"), "topk_method"),
    (dict(model_type="gpt_oss", **FAMILY_TINY["gpt_oss"], swiglu_alpha=1.0), "swiglu_alpha 1.0"),
    (dict(model_type="gpt_oss", **FAMILY_TINY["gpt_oss"], attention_bias=False), "attention_bias false"),
    (dict(model_type="deepseek_v3", **FAMILY_TINY["deepseek_v3"], scoring_func="softmax"), "scoring_func 'softmax'"),
    (dict(model_type="deepseek_v3", **FAMILY_TINY["deepseek_v3"], topk_method="greedy"), "topk_method 'greedy'"),
    (dict(model_type="deepseek_v3", **FAMILY_TINY["deepseek_v3"], rope_interleave=False), "rope_interleave"),
    (dict(model_type="deepseek_v3", **FAMILY_TINY["deepseek_v3"], moe_layer_freq=2), "moe_layer_freq 2"),
    (dict(model_type="qwen3", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"), (dict(rope_scaling=dict(rope_type="dynamic")), "dynamic"),
    (dict(hidden_act="gelu"), "gelu"), (dict(attention_bias=True), "attention_bias"), (dict(rope_scaling=dict(rope_type="yarn")), "yarn"),
    (dict(quantization_config=dict(quant_method="mxfp4")), "mxfp4")])
def test_what_cannot_be_represented_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        model(**changes)


@pytest.mark.parametrize(("changes", "windowed"), [
    (dict(model_type="qwen2", use_sliding_window=False, sliding_window=4, max_window_layers=2), ()),
    (dict(model_type="mistral", sliding_window=4), (0, 1, 2, 3)), (dict(model_type="mistral", sliding_window=None), ()),
    (dict(model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=2), (2, 3)),
    (dict(model_type="llama", sliding_window=4), ()),
    (dict(model_type="gpt_oss", **FAMILY_TINY["gpt_oss"]), (0, 2))])
def test_which_layers_have_a_window(changes: dict[str, Any], windowed: tuple[int, ...]) -> None:
    c = model(**changes)
    assert (c.windowed_layers, c.sliding_window is None) == (windowed, not windowed)


def keys_seen(window: int | None) -> list[list[int]]:
    """In a rank: for each of 8 positions the keys that attention gives weight to."""
    from parallel.attention import SDPACoreAttention

    config = SimpleNamespace(context_parallel_size=1, window_size=window and (window - 1, 0), window_attn_skip_freq=None, softmax_type="vanilla")
    x, value = torch.zeros(8, 1, 1, 4), torch.eye(8)[:, None, None]  # a key's weight shows in the column of its position
    return [row.nonzero().flatten().tolist() for row in SDPACoreAttention(config, 1, None, "self")(x, x, value)[:, 0]]


def test_keys_that_a_window_shows() -> None:
    """A window of 4: a position sees itself and three before it."""
    assert run_ranks(1, keys_seen, 4)[0] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]]
    assert run_ranks(1, keys_seen, None)[0] == [list(range(n + 1)) for n in range(8)]


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"])
def test_keys_that_config_json_lacks_are_read_as_transformers_does(family: str) -> None:
    """A config.json with the sizes alone means what transformers' configuration class makes of it."""
    from transformers import AutoConfig

    needed = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 32, "vocab_size": 203}
    theirs = AutoConfig.for_model(family, **needed)
    of_the_family = ("moe_", "shared_", "kv_", "q_lora", "qk_", "v_head", "n_", "num_local", "num_experts")
    sizes = {key: value for key, value in theirs.to_dict().items() if key.startswith(of_the_family)}
    c = ModelConfig.from_hf({"model_type": family, **needed, **sizes})
    assert (c.num_kv_heads, c.rms_norm_eps, c.rope_theta) == (
        theirs.num_key_value_heads if c.mla is None else 32, theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert c.sliding_window == (theirs.sliding_window or None if hasattr(theirs, "sliding_window") else None)
    assert isinstance(c.rope_scaling, Yarn) == (theirs.rope_parameters["rope_type"] == "yarn")
    if c.mla is None:
        assert c.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)


def test_padded_vocabulary() -> None:
    m = model(vocab_size=203).with_options(make_vocab_size_divisible_by=8)
    assert [m.padded_vocab_size(tp) for tp in (1, 2, 4)] == [208, 208, 224]
