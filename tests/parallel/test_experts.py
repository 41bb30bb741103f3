"""Routers choose as they should, correction biases stay what they are, and experts train alike under every cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.model_config import MoE
from parallel.routing import choose_experts
from tests.models import write_model
from tests.parallel.test_models import train
from tests.worker_pool import run_ranks

BIAS = [8.0, 8.01, 7.0, 7.0]


def logits_of(scores: list[float]) -> torch.Tensor:
    """One token whose sigmoids are `scores`."""
    return torch.tensor([scores]).logit()


def test_the_correction_bias_chooses_and_does_not_weigh() -> None:
    """8.01 + 0.495 beats 8.0 + 0.5; rounded to bfloat16 both biases are 8 and the other expert would win."""
    moe = MoE(4, 1, 8, (0,), score="sigmoid", normalize=False, scaling=2.5, correction_bias=True)
    weights, indices = choose_experts(logits_of([0.5, 0.495, 0.2, 0.1]), moe, torch.tensor(BIAS))
    assert indices.tolist() == [[1]]
    torch.testing.assert_close(weights, torch.tensor([[0.495 * 2.5]]))
    _, rounded = choose_experts(logits_of([0.5, 0.495, 0.2, 0.1]), moe, torch.tensor(BIAS).bfloat16().float())
    assert rounded.tolist() == [[0]]


def test_groups_are_ranked_by_the_sum_of_two_or_by_the_best() -> None:
    """Experts 0-2 hold the best one, experts 3-5 the best two: sigmoid routers sum two, softmax routers take the best, nobody three."""
    scores = [0.9, 0.3, 0.3, 0.65, 0.6, 0.0]
    sigmoid = MoE(6, 3, 8, (0,), score="sigmoid", normalize=True, groups=2, top_groups=1)
    weights, indices = choose_experts(logits_of([*scores[:5], 1e-6]), sigmoid)
    by_expert = dict(zip(indices[0].tolist(), weights[0].tolist(), strict=True))
    assert sorted(by_expert) == [3, 4, 5]
    assert by_expert == pytest.approx({3: 0.65 / 1.25, 4: 0.6 / 1.25, 5: 0.0}, abs=1e-5)
    softmax = MoE(6, 2, 8, (0,), normalize=False, groups=2, top_groups=1)
    weights, indices = choose_experts(torch.tensor([scores]), softmax)
    total = sum(torch.tensor(scores).exp().tolist())
    assert sorted(indices[0].tolist()) in ([0, 1], [0, 2])
    torch.testing.assert_close(weights[0, 0], torch.tensor(scores[0]).exp() / total)


def test_weights_are_normalised_where_the_model_says_so() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    probabilities = logits.softmax(-1)
    for normalize in (True, False):
        weights, indices = choose_experts(logits, MoE(4, 2, 8, (0,), normalize=normalize))
        assert indices.tolist() == [[1, 2]]
        chosen = probabilities[0, [1, 2]]
        torch.testing.assert_close(weights[0], chosen / chosen.sum() if normalize else chosen)


def bias_in_bf16(directory: str) -> Any:
    """In a rank: a bf16 model before and after a training step."""
    from checkpoint.hf import read_hf
    from parallel.config import ParallelConfig
    from parallel.device import Device, prepare_megatron
    from parallel.micro_batch import make_micro_batches
    from parallel.model_config import ModelConfig
    from parallel.training import OptimizerConfig, build
    from resharding.layouts import mcore_layout

    device = Device("cpu", "gloo")
    prepare_megatron(device)
    model = ModelConfig.from_directory(directory, make_vocab_size_divisible_by=8)
    training = build(model, ParallelConfig(), "bfloat16", device, 0, 1, 7, OptimizerConfig(lr=0.1, weight_decay=0.5))
    read_hf(directory, mcore_layout(model, ParallelConfig(), 0, 1, torch.bfloat16), training.tensors, model)
    training.reload_main_params()
    before = {n: t.clone() for n, t in training.tensors.items()}
    batches = make_micro_batches([[5, 6, 7, 8]], [[0]], training.parallel)
    training.forward_backward(batches, lambda batch, log_probs, entropy: (-log_probs.sum(), {}))
    training.optimizer_step()
    return before, {n: t.clone() for n, t in training.tensors.items()}


def test_the_correction_bias_stays_fp32_and_as_loaded(tmp_path: Path) -> None:
    """In a bfloat16 model, through loading, a forward pass and an optimizer step with weight decay; everything else is trained."""
    from safetensors.torch import load_file, save_file

    directory = write_model(tmp_path / "m", "deepseek_v3", dtype="bfloat16", num_hidden_layers=2)
    full, name = load_file(directory / "model.safetensors"), "model.layers.1.mlp.gate.e_score_correction_bias"
    full[name] = torch.tensor([8.0, 8.01, 7.0, 7.0, 8.003, 7.9, 8.0, 7.1])
    save_file(full, directory / "model.safetensors", metadata={"format": "pt"})
    before, after = run_ranks(1, bias_in_bf16, str(directory))[0]
    bias = "decoder.layers.1.mlp.router.expert_bias"
    for tensors in (before, after):
        assert tensors[bias].dtype == torch.float32 and torch.equal(tensors[bias], full[name])
        assert {t.dtype for n, t in tensors.items() if n != bias} == {torch.bfloat16}
    assert not torch.equal(before["decoder.layers.1.mlp.router.weight"], after["decoder.layers.1.mlp.router.weight"])


@pytest.mark.parametrize(("family", "cuts"), [
    ("qwen3_moe", [(dict(ep=2), {})]),
    pytest.param("qwen3_moe", [(dict(tp=2, sequence_parallel=True, etp=1), options) for options in ({}, dict(distributed=False))], marks=pytest.mark.slow),
    pytest.param("gpt_oss", [(dict(ep=2), dict(distributed=False)), (dict(tp=2, sequence_parallel=True, ep=2, etp=1), {})], marks=pytest.mark.slow)])
def test_training_with_experts_is_the_same_however_it_is_cut(tmp_path: Path, family: str, cuts: list[Any]) -> None:
    """Losses, gradient norms and weights of three optimizer steps (see `test_training_is_the_same_however_it_is_cut`)."""
    directory = str(write_model(tmp_path / "m", family))
    losses, norms, weights, _ = run_ranks(1, train, directory, {}, 8, eps=1e-4, distributed=False)[0]
    for parallel, options in cuts:
        got = run_ranks(2, train, directory, parallel, 4, eps=1e-4, **options)[0]
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(losses), atol=1e-5, rtol=1e-6, msg=lambda m: f"loss, {parallel}: {m}")
        torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(norms), atol=0, rtol=1e-4, msg=lambda m: f"norm, {parallel}: {m}")
        for name, value in weights.items():
            torch.testing.assert_close(got[2][name], value, atol=1e-6, rtol=1e-4, msg=lambda m: f"{name}, {parallel}: {m}")


def save_then_load(directory: str, target: str, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """In a rank: what one layout writes in Megatron's format, another reads; all tensors are the directory's."""
    import torch.distributed as dist

    from checkpoint.hf import read_hf
    from checkpoint.mcore import load_model, save_model
    from parallel.config import ParallelConfig
    from parallel.device import Device, prepare_megatron
    from parallel.model_config import ModelConfig
    from parallel.training import build
    from resharding.layout import empty_tensors
    from resharding.layouts import mcore_layout

    device, rank, world = Device("cpu", "gloo"), dist.get_rank(), dist.get_world_size()
    prepare_megatron(device)
    model = ModelConfig.from_directory(directory, make_vocab_size_divisible_by=8)
    for sizes, move in ((saved, save_model), (loaded, load_model)):
        parallel = ParallelConfig(**sizes)
        training = build(model, parallel, "float32", device, rank, world, 7)
        layout = mcore_layout(model, parallel, rank, world, torch.float32)
        expected = empty_tensors(layout)
        read_hf(directory, layout, expected, model)
        if move is save_model:
            for name, tensor in training.tensors.items():
                tensor.copy_(expected[name])
        move(target, training)
        for name, tensor in training.tensors.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_megatrons_checkpoints_hold_biases_and_sinks_under_any_layout(tmp_path: Path, family: str) -> None:
    directory = str(write_model(tmp_path / "m", family))
    saved, loaded = dict(tp=2, sequence_parallel=True, ep=2, etp=1), dict(pp=2, first_stage_layers=1)
    run_ranks(2, save_then_load, directory, str(tmp_path / "mcore"), saved, loaded)
