"""The engine and the trainer agree: log-probs of sampled tokens are those of a Megatron forward with the weights that a sync brought."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import write_model
from tests.trtllm_rollout.engines import prompts, recomputed_log_probs, requests
from tests.worker_pool import run_ranks

FP32 = 1e-4
# bf16 keeps 8 bits and the two sides round in other places; where rounding sends a token to another expert its log-prob is another one.
# Bounds on the mean, twice what is measured (transformers in bf16 is as far from fp32: see test_decoder.py)
BF16 = {"llama": 0.08, "qwen3_moe": 0.08, "deepseek_v3": 0.2, "gpt_oss": 0.6}
FAMILIES = list(BF16)


def rollouts(cases: list[tuple[str, dict[str, Any], dict[str, Any]]], dtype: str,
             tp: int) -> list[list[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]]:
    """On a rank: for every (model, trainer's sizes, options of the rollout) the samples drawn after a sync: prompt and answer, and the
    answer's log-probs by the engine and by the trainer."""
    import torch.distributed as dist

    from checkpoint.hf import read_hf
    from mcore_rl.exchange import Exchange
    from mcore_rl.policy import Policy
    from mcore_rl.rollout import Rollout
    from parallel.config import ParallelConfig
    from parallel.device import Device, prepare_megatron
    from parallel.model import torch_dtype
    from parallel.model_config import ModelConfig
    from parallel.training import build
    from resharding.layouts import mcore_layout

    device, rank, world, out = Device("cpu", "gloo"), dist.get_rank(), dist.get_world_size(), []
    prepare_megatron(device)
    for directory, sizes, options in cases:
        model = ModelConfig.from_directory(directory, make_vocab_size_divisible_by=8)
        training = build(model, ParallelConfig(**sizes), dtype, device, rank, world, 7)
        read_hf(directory, mcore_layout(model, training.parallel, rank, world, training.dtype), training.tensors, model)
        rollout = Rollout(model, torch_dtype(dtype), tp, 4, device, Exchange(), rank, world, **options)
        rollout.sync(training, 1)
        done = rollout.generate(requests(prompts(4), samples=2, temperature=0.8, max_tokens=24))
        whole = [(*prompts(4)[c.request_id], *c.token_ids) for c in done]
        expected, _ = Policy(training, rollout.exchange, world).log_probs(whole, 4, 0.8)
        out.append([(ids, torch.tensor(c.log_probs), row[-len(c.token_ids):].float()) for ids, c, row in zip(whole, done, expected, strict=True)])
    return out


def gaps(samples: list[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    assert len(samples) == 8 and all(len(engine) == 24 for _, engine, _ in samples)
    return torch.cat([(engine - trainer).abs() for _, engine, trainer in samples])


def cases(root: Path) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Both sides cut over two ranks, experts over expert-parallel ranks."""
    sizes: dict[str, Any] = dict(tp=2, sequence_parallel=True)
    return [(str(write_model(root / family, family)), dict(sizes, ep=2, etp=1) if family != "llama" else sizes,
             dict(moe_ep=2) if family != "llama" else {}) for family in FAMILIES]


def test_log_probs_are_those_of_a_megatron_forward(tmp_path: Path) -> None:
    for results in run_ranks(2, rollouts, cases(tmp_path), "float32", 2):
        for family, samples in zip(FAMILIES, results, strict=True):
            assert gaps(samples).max() < FP32, family


@pytest.mark.slow
def test_bf16_log_probs_are_near_those_of_a_megatron_forward(tmp_path: Path) -> None:
    for results in run_ranks(2, rollouts, cases(tmp_path), "bfloat16", 2):
        for family, samples in zip(FAMILIES, results, strict=True):
            assert gaps(samples).mean() < BF16[family], family


# FP8 block weights: made by the sync, held by the engine

WHOLE_BLOCKS = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=64, num_hidden_layers=2,
                    initializer_range=0.06)
FP8 = {"llama": {}, "qwen3_moe": dict(moe_intermediate_size=128, num_experts=4),
       "deepseek_v3": dict(moe_intermediate_size=128, n_routed_experts=4, n_group=2, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64,
                           qk_rope_head_dim=64, v_head_dim=64)}


def quantised_copy(directory: str, root: Path) -> Path:
    """The model with every weight that FP8 stores rounded to it, by the definition of the format."""
    from safetensors.torch import load_file, save_file

    from parallel.model_config import ModelConfig
    from resharding.layouts.fp8 import fp8_weights
    from tests.resharding.test_fp8 import by_hand

    copy = Path(shutil.copytree(directory, root / (Path(directory).name + "-fp8")))
    tensors = load_file(copy / "model.safetensors")
    for name in fp8_weights(ModelConfig.from_directory(directory)):
        codes, scale = by_hand(tensors[name])
        rows, columns = codes.shape
        tensors[name] = codes.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_fp8_weights_made_by_a_sync_give_the_log_probs_of_the_rounded_model(tmp_path: Path) -> None:
    """The trainer's weights are not rounded, and their log-probs are others; the engine's are exactly those of rounded weights."""
    sizes: dict[str, Any] = dict(tp=2, sequence_parallel=True)
    directories = [str(write_model(tmp_path / family, family, **{**WHOLE_BLOCKS, **changes})) for family, changes in FP8.items()]
    given = [(d, sizes if "llama" in d else dict(sizes, ep=2, etp=1), dict(fp8=True, moe_ep=1 if "llama" in d else 2)) for d in directories]
    results = run_ranks(2, rollouts, given, "float32", 2)
    for directory, samples in zip(directories, results[0], strict=True):
        rounded = quantised_copy(directory, tmp_path)
        for ids, engine, _ in samples:
            prompt = len(ids) - len(engine)
            expected = recomputed_log_probs(rounded, ids[:prompt], ids[prompt:], 0.8)
            torch.testing.assert_close(engine.double(), expected, atol=FP32, rtol=0)
        assert gaps(samples).max() > 100 * FP32, "rounding to FP8 cannot be seen in these log-probs"
