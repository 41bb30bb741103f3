"""The decoder equals transformers for every family: logits of whole sequences, on one rank and on several, and row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import FAMILY_TINY, LLAMA3_ROPE, reference_logits, write_model
from tests.parallel.families import SEQUENCES
from tests.parallel.test_families import OPTIONS
from tests.trtllm_rollout.whole_sequence import attention_of, logits_of, make_decoder
from tests.worker_pool import run_ranks
from trtllm_rollout.embedded import attention_blocks
from trtllm_rollout.embedded.decoder import Decoder
from trtllm_rollout.embedded.linear import silu
from trtllm_rollout.embedded.rotary import rotate_

BOUND = 1e-4  # of a log-prob, in fp32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_model(root / family, family) for family in FAMILY_TINY}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, torch.Tensor]:
    return {family: reference(directory) for family, directory in models.items()}


def reference(directory: Path) -> torch.Tensor:
    """Log-probs [tokens of all sequences, vocabulary] of transformers."""
    return torch.cat([reference_logits(directory, [ids])[0] for ids in SEQUENCES]).log_softmax(-1)


def gap(decoder: Decoder, expected: torch.Tensor) -> float:
    logits = logits_of(decoder, SEQUENCES)
    assert logits is not None
    return float((logits.log_softmax(-1) - expected).abs().max())


@pytest.mark.parametrize("family", FAMILY_TINY)
def test_logits_are_those_of_transformers(family: str, models: dict[str, Path], expected: dict[str, torch.Tensor]) -> None:
    assert gap(make_decoder(models[family]), expected[family]) < BOUND


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    **OPTIONS, "llama3 rope": ("llama", dict(rope_parameters=LLAMA3_ROPE)), "tied": ("qwen2", dict(tie_word_embeddings=True)),
    "head_dim of its own": ("llama", dict(head_dim=32)), "one expert a token": ("qwen3_moe", dict(num_experts_per_tok=1)),
}


@pytest.mark.parametrize("option", MORE)
def test_options_of_the_families(option: str, tmp_path: Path) -> None:
    family, changes = MORE[option]
    directory = write_model(tmp_path, family, **{"num_hidden_layers": 2, **changes})
    assert gap(make_decoder(directory), reference(directory)) < BOUND


def of_rank(directories: list[str], tp: int, moe_ep: int) -> list[torch.Tensor | None]:
    import torch.distributed as dist

    return [logits_of(make_decoder(d, tp=tp, rank=dist.get_rank(), moe_ep=moe_ep, group=dist.group.WORLD), SEQUENCES) for d in directories]


@pytest.mark.parametrize(("tp", "moe_ep", "families"), [
    (4, 2, ["qwen2_moe", "deepseek_v3", "gpt_oss"]), (4, 4, ["glm4_moe", "mixtral"])])
def test_tensor_and_expert_parallel_ranks_give_the_same_logits(tp: int, moe_ep: int, families: list[str], models: dict[str, Path],
                                                               expected: dict[str, torch.Tensor]) -> None:
    leader, *others = run_ranks(tp, of_rank, [str(models[f]) for f in families], tp, moe_ep)
    assert all(logits is None for rank in others for logits in rank)
    for family, logits in zip(families, leader, strict=True):
        assert float((logits.log_softmax(-1) - expected[family]).abs().max()) < BOUND, family


@torch.inference_mode()
def hidden_of(decoder: Decoder, sequences: list[list[int]]) -> list[torch.Tensor]:
    lengths = [len(s) for s in sequences]
    rows = decoder.hidden(torch.tensor([i for s in sequences for i in s]), torch.cat([torch.arange(n) for n in lengths]),
                          attention_of(decoder.heads, lengths))
    return list(rows.split(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_rows_do_not_depend_on_the_other_rows(family: str, dtype: torch.dtype, models: dict[str, Path]) -> None:
    """To the bit, from one row alone (whose experts have no other) to all of them, in any order."""
    decoder = make_decoder(models[family], dtype)
    sequences = [ids[:n] for ids in SEQUENCES for n in (1, 2, 3, 5, 9)]
    together = hidden_of(decoder, sequences)
    backwards = hidden_of(decoder, sequences[::-1])[::-1]
    for ids, one, other in zip(sequences, together, backwards, strict=True):
        (alone,) = hidden_of(decoder, [ids])
        assert torch.equal(alone, one) and torch.equal(alone, other), f"{len(ids)} tokens"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("columns", [96, 100, 1001, 40000])
def test_silu_of_a_row_does_not_depend_on_other_rows_or_threads(columns: int, threads: int) -> None:
    wide = torch.randn(1300 if columns < 1000 else 70 if columns < 2000 else 5, 2 * columns, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for x in (wide, wide.bfloat16()):
            gate = x.chunk(2, -1)[0]
            every = silu(gate)
            torch.testing.assert_close(every, gate * gate.double().sigmoid().to(x.dtype))
            for rows in (1, 2, 7, 333, 700, 1299):
                assert torch.equal(silu(gate[:rows]), every[:rows]) and torch.equal(silu(gate[-rows:]), every[-rows:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILY_TINY)
def test_bf16_is_as_near_to_fp32_as_transformers_is(family: str, models: dict[str, Path]) -> None:
    """Mean gap of log-probs to fp32, of this decoder and of transformers in bf16."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 200, (30,), generator=generator).tolist() for _ in range(6)]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.bfloat16, attn_implementation="eager").eval()
        theirs = torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])
    ours = logits_of(make_decoder(models[family], torch.bfloat16), sequences)
    exact = torch.cat([reference_logits(models[family], [ids])[0] for ids in sequences])
    gaps = [float((logits.float().log_softmax(-1) - exact.log_softmax(-1)).abs().mean()) for logits in (ours, theirs)]
    assert 0 < gaps[0] < 1.5 * gaps[1], gaps


def changed(part: str, **values: Any) -> Callable[[Decoder], None]:
    """A fault: these fields of every layer's attention or mlp have other values."""
    def change(decoder: Decoder) -> None:
        decoder._layers = [replace(layer, **{part: replace(getattr(layer, part), **{
            name: value(getattr(getattr(layer, part), name)) for name, value in values.items()
            if hasattr(getattr(layer, part), name)})}) for layer in decoder._layers]
        decoder.heads = tuple(layer.attention.heads for layer in decoder._layers)
    return change


FAULTS: dict[str, tuple[str, Callable[[Decoder], None]]] = {
    "window one too long": ("mistral", changed("attention", heads=lambda h: replace(h, window=h.window + 1))),
    "no sinks": ("gpt_oss", changed("attention", heads=lambda h: replace(h, sinks=None))),
    "no bias on o": ("gpt_oss", changed("attention", o=lambda o: replace(o, bias=None))),
    "no expert bias": ("gpt_oss", changed("mlp", down=lambda d: replace(d, bias=None))),
    "no router bias": ("gpt_oss", changed("mlp", router_bias=lambda b: None)),
    "clamp too wide": ("gpt_oss", changed("mlp", limit=lambda limit: None)),
    "YaRN's scale left out of the scores": ("deepseek_v3", changed("attention", heads=lambda h: replace(h, scale=24 ** -0.5))),
    "the model's eps in the latent norm": ("deepseek_v2", changed("attention", kv_norm=lambda w: 1.001 * w)),
    "no correction bias": ("deepseek_v3", changed("mlp", correction_bias=lambda b: None)),
    "no shared gate": ("qwen2_moe", changed("mlp", shared_gate=lambda g: None)),
    "no qk-norm": ("qwen3", changed("attention", q_norm=lambda w: None)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_faults(fault: str, models: dict[str, Path], expected: dict[str, torch.Tensor]) -> None:
    family, change = FAULTS[fault]
    decoder = make_decoder(models[family])
    change(decoder)
    assert gap(decoder, expected[family]) > 10 * BOUND


def test_the_comparison_finds_pairs_that_are_turned_by_halves(models: dict[str, Path], expected: dict[str, torch.Tensor],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "rotate_", lambda x, cos, sin, side_by_side=False: rotate_(x, cos, sin, not side_by_side))
    for family in ("llama", "deepseek_v3", "glm4_moe"):
        assert gap(make_decoder(models[family]), expected[family]) > 10 * BOUND


def test_what_is_stated_of_the_heads(models: dict[str, Path]) -> None:
    """Attention and cache are sized by it, so every rank must state its own share."""
    for family, tp in (("gpt_oss", 1), ("gpt_oss", 4), ("deepseek_v3", 2), ("mistral", 1)):
        heads = make_decoder(models[family], tp=tp).heads
        assert len(heads) == 4 and all(h.queries == 4 // tp for h in heads)
        if family == "deepseek_v3":
            assert all(h.latent and (h.kv, h.key_dim, h.value_dim) == (1, 32, 24) for h in heads)
        if family == "gpt_oss":
            assert [h.window for h in heads] == [5, None, 5, None]
            assert all(h.kv == max(1, 2 // tp) and h.sinks is not None and h.sinks.shape == (4 // tp,) for h in heads)
        if family == "mistral":
            assert all(h.window == 5 and h.sinks is None and not h.latent for h in heads)
