"""Parallel sizes are checked before anything is built, with a message that has the numbers; model configs are read as transformers does."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from tests.models import TINY

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
    (2, dict(cp=2), ["cp=2"]),
])
def test_sizes_that_do_not_fit_are_refused(world: int, parallel: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        ParallelConfig(**parallel).validate(world, model())
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
    (dict(hidden_act="gelu"), "gelu"), (dict(attention_bias=True), "attention_bias"), (dict(rope_scaling=dict(rope_type="yarn")), "yarn"),
    (dict(quantization_config=dict(quant_method="fp8")), "quantised")])
def test_what_cannot_be_represented_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        model(**changes)


def test_a_sliding_window_that_is_switched_off_is_full_attention() -> None:
    assert model(model_type="qwen2", use_sliding_window=False, sliding_window=4).qkv_bias


def test_padded_vocabulary() -> None:
    m = model(vocab_size=203).with_options(make_vocab_size_divisible_by=8)
    assert [m.padded_vocab_size(tp) for tp in (1, 2, 4)] == [208, 208, 224]
