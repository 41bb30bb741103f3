"""Every family equals transformers: log-probs and the gradient of every parameter, under every kind of layout, at a large initial std."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import FAMILY_TINY, YARN
from tests.parallel.families import SEQUENCES, Written, log_probs_and_gradients, with_fault, write
from tests.worker_pool import run_ranks

# largest difference: of a log-prob; of a gradient, relative to the largest of its tensor (rounding alone makes 2e-5)
LOG_PROB, GRADIENT = 1e-4, 4e-5
WITH_EXPERTS = [f for f, sizes in FAMILY_TINY.items() if "num_experts_per_tok" in sizes]
SEQUENCE = dict(tp=2, sequence_parallel=True)
LAYOUTS: list[tuple[int, dict[str, Any], list[str]]] = [
    (1, {}, list(FAMILY_TINY)),
    (2, dict(tp=2), ["mistral", "qwen3"]),
    (2, dict(ep=2), ["qwen3_moe", "mixtral", "glm4_moe"]), (2, dict(SEQUENCE, etp=1), ["qwen3_moe"]),
    (2, dict(SEQUENCE, ep=2, etp=1), ["qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]),
    (2, dict(pp=2, first_stage_layers=1), ["deepseek_v3", "gpt_oss"]),
    (2, dict(pp=2, vpp=2, pipeline_layout="Et|t|tt|L"), ["deepseek_v3", "qwen2_moe"]),
]
MORE_LAYOUTS: list[tuple[int, dict[str, Any], list[str]]] = [
    (2, dict(tp=2), ["llama", "qwen2"]), (2, SEQUENCE, ["llama", "mistral", "qwen2", "qwen3"]), (2, dict(ep=2), WITH_EXPERTS),
    (2, dict(SEQUENCE, etp=1), WITH_EXPERTS), (2, dict(SEQUENCE, etp=2), [f for f in WITH_EXPERTS if f != "gpt_oss"]),
    (2, dict(SEQUENCE, ep=2, etp=1), WITH_EXPERTS), (2, dict(pp=2), list(FAMILY_TINY)), (2, dict(pp=2, vpp=2), list(FAMILY_TINY)),
    (2, dict(pp=2, last_stage_layers=3), ["mistral", "gpt_oss", "deepseek_v2"]), (2, dict(pp=2, pipeline_layout="E|ttttL"), ["glm4_moe", "gpt_oss"]),
    (4, dict(SEQUENCE, ep=2, etp=2), ["qwen2_moe", "mixtral", "deepseek_v3"]), (4, dict(SEQUENCE, pp=2), ["llama", "qwen3"]),
    (4, dict(SEQUENCE, pp=2, ep=2, etp=1), ["deepseek_v3", "gpt_oss", "qwen3_moe"]), (4, dict(ep=4), ["qwen3_moe", "gpt_oss"]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """One model of every family. gpt_oss at std 0.2: at 0.3 its gradients are rounding noise of 1e-4."""
    root = tmp_path_factory.mktemp("families")
    return {family: write(root, family, family, initializer_range=0.2 if family == "gpt_oss" else 0.3) for family in FAMILY_TINY}


def check(world: int, parallel: dict[str, Any], models: dict[str, Written]) -> None:
    ranks = run_ranks(world, log_probs_and_gradients, [(m.directory, m.gradients) for m in models.values()], parallel)
    for k, (name, model) in enumerate(models.items()):
        found = {i: row for rank in ranks for i, row in rank[k][0].items()}
        assert sorted(found) == list(range(len(SEQUENCES)))
        for i, want in enumerate(model.log_probs):
            torch.testing.assert_close(found[i], want, atol=LOG_PROB, rtol=0, msg=lambda m: f"{name} {parallel}, sequence {i}: {m}")
        for rank, results in enumerate(ranks):
            for tensor, error in results[k][1].items():
                assert error < GRADIENT, f"{name} {parallel}: gradient of {tensor} on rank {rank} is off by {error:.1e} of its largest"


@pytest.mark.parametrize(("world", "parallel", "families"), LAYOUTS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_log_probs_and_gradients_equal_transformers(world: int, parallel: dict[str, Any], families: list[str], models: dict[str, Written]) -> None:
    check(world, parallel, {f: models[f] for f in families})


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parallel", "families"), MORE_LAYOUTS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_under_more_layouts(world: int, parallel: dict[str, Any], families: list[str], models: dict[str, Written]) -> None:
    check(world, parallel, {f: models[f] for f in families})


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows of qwen2 from a layer on": ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "windows of qwen2 switched off": ("qwen2", dict(use_sliding_window=False, sliding_window=4, max_window_layers=1)),
    "no window": ("mistral", dict(sliding_window=None)),
    "windows of qwen2_moe, normalised weights, every second layer": (
        "qwen2_moe", dict(use_sliding_window=True, sliding_window=4, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[])),
    "windows of qwen3_moe, weights as they are": ("qwen3_moe", dict(use_sliding_window=True, sliding_window=4, norm_topk_prob=False)),
    "window of mixtral": ("mixtral", dict(sliding_window=4)),
    "YaRN of grouped-query attention": ("qwen3", dict(rope_parameters=YARN)),
    "attention factor": ("qwen3", dict(rope_parameters=dict(YARN, attention_factor=1.3))),
    "groups by their best expert": ("deepseek_v2", dict(topk_method="group_limited_greedy", n_group=4, topk_group=1, num_experts_per_tok=2)),
    "query not compressed, mscales that differ": (
        "deepseek_v2", dict(q_lora_rank=None, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.5))),
    "query not compressed, no YaRN, one expert, weights as they are": (
        "deepseek_v3", dict(q_lora_rank=None, rope_parameters=dict(rope_type="default", rope_theta=500.0), norm_topk_prob=False,
                            num_experts_per_tok=1, topk_group=1)),
    "no qk-norm, no bias, one group": ("glm4_moe", dict(use_qk_norm=False, attention_bias=False, n_group=1)),
    "other windows, tight clamp": ("gpt_oss", dict(layer_types=["full_attention", "sliding_attention"], swiglu_limit=0.5, initializer_range=0.2)),
}


def test_options_of_the_families(tmp_path: Path) -> None:
    check(1, {}, {name: write(tmp_path, family, str(i), **{"num_hidden_layers": 2, **changes})
                  for i, (name, (family, changes)) in enumerate(OPTIONS.items())})


FAULTS = {"latent attention as Megatron has it": "deepseek_v3", "expert biases summed over tp": "gpt_oss", "window one too long": "gpt_oss",
          "sinks left out": "gpt_oss", "no correction bias": "deepseek_v3", "Megatron's choice of groups": "deepseek_v2"}


def test_the_comparison_finds_faults(tmp_path: Path, models: dict[str, Written]) -> None:
    """Each fault leaves the run without an error, and some leave the log-probs alone: the gradients show it by 100 times the bound."""
    grouped = write(tmp_path, "deepseek_v2", "grouped", topk_method="group_limited_greedy", n_group=2, topk_group=1)
    cases = [(fault, *((m.directory, m.gradients) if family != "deepseek_v2" else (grouped.directory, grouped.gradients)))
             for fault, family in FAULTS.items() for m in [models[family]]]
    ranks = run_ranks(2, with_fault, cases, dict(SEQUENCE, ep=2, etp=1))
    for k, fault in enumerate(FAULTS):
        worst = max(error for rank in ranks for error in rank[k].values())
        assert worst > 100 * GRADIENT, f"{fault}: {worst:.1e}"
