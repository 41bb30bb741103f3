"""Emulated FP8 training against a quantise-dequantise written here, under every cut; and the recipes of Transformer Engine, with stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.device import Device
from parallel.errors import UserError
from parallel.fp8_recipe import RECIPES, Platform, check_fp8, fill_up, te_options
from parallel.micro_batch import make_micro_batches
from parallel.model_config import ModelConfig
from tests.models import TINY, write_model
from tests.parallel.families import SEQUENCES
from tests.parallel.test_models import gathered
from tests.worker_pool import run_ranks

SEQUENCE = dict(tp=2, sequence_parallel=True)


def by_hand(x: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix to e4m3 and back, block by block."""
    out = x.clone()
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i:i + rows, j:j + columns]
            scale = block.abs().max() / 448
            if scale > 0:
                out[i:i + rows, j:j + columns] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return out


def rounded_rows(x: Tensor) -> Tensor:
    return by_hand(x.reshape(-1, x.shape[-1]), 1, 128).view(x.shape)


def reference(directory: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """transformers with rounded operands in every linear layer of the decoder: log-probs, and gradients of minus their mean."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    def forward(linear: torch.nn.Linear, x: Tensor) -> Tensor:
        a = x + (rounded_rows(x.detach()) - x.detach())
        w = linear.weight + (by_hand(linear.weight.detach(), 128, 128) - linear.weight.detach())
        out = torch.nn.functional.linear(a, w)
        out.register_hook(rounded_rows)
        return out if linear.bias is None else out + linear.bias

    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear) and "lm_head" not in name:
            part.forward = forward.__get__(part)  # type: ignore[method-assign]
    rows = [model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0] for ids in SEQUENCES]
    (-torch.cat(rows).mean()).backward()
    return [r.detach() for r in rows], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def trained(directory: str, parallel: dict[str, Any], fp8: str | None = "blockwise", steps: int = 1) -> Any:
    """On a rank: (losses, first step's log-probs by sequence, its canonical gradients, what the linear layers round their weights to)."""
    import torch.distributed as dist

    from checkpoint.hf import read_hf
    from parallel.device import prepare_megatron
    from parallel.fp8_linear import _linears, rounded_weight
    from parallel.packing import Batching, plan_micro_batches
    from parallel.options import TrainingOptions
from parallel.training import OptimizerConfig, build
    from resharding.layouts import mcore_layout

    rank, world, device = dist.get_rank(), dist.get_world_size(), Device("cpu", "gloo")
    prepare_megatron(device)
    model, layout = ModelConfig.from_directory(directory, make_vocab_size_divisible_by=8), ParallelConfig(**parallel)
    layout.validate(world, model)
    training = build(model, layout, "float32", device, rank, world, 7, OptimizerConfig(distributed=False, lr=3e-3), options=TrainingOptions(fp8=fp8))
    read_hf(directory, mcore_layout(model, layout, rank, world, torch.float32), training.tensors, model)
    training.reload_main_params()
    values = dict(training.tensors)
    if fp8:
        for name, linear in _linears(training.modules[0]):
            values[f"decoder.layers.{name}.weight"] = rounded_weight(linear.weight, *linear._forward_impl.args[1:3])
    rounded = gathered(training, values)
    count = sum(len(s) - 1 for s in SEQUENCES)

    def loss(batch: Any, log_probs: Tensor, entropy: Tensor) -> Any:
        return -log_probs.sum() / count, {i: row.detach() for i, row in zip(batch.indices, batch.split(log_probs), strict=True)}

    losses, first, grads = [], {}, {}
    plan = plan_micro_batches(SEQUENCES, range(len(SEQUENCES)), None, 2, Batching(), model, layout, layout.dp(world))
    for step in range(steps):
        outputs = training.forward_backward(make_micro_batches(SEQUENCES, plan[training.at.dp], layout), loss)
        rows = {i: row for output in outputs for i, row in output.items()}
        losses.append(-sum(row.sum().item() for row in rows.values()) / count)
        if not step:
            first = rows
            grads = gathered(training, {**training.tensors, **{n: p.main_grad for n, p in training.modules[0].named_parameters()}})
        training.optimizer_step()
    return losses, first, grads, rounded


def close(got: Any, directory: str, name: str) -> None:
    """To fp32's accuracy: inputs of a rounding that differ in their last bit are rounded alike unless they lie at a border, which none does here."""
    log_probs, gradients = reference(directory)
    for i, row in got[1].items():
        torch.testing.assert_close(row, log_probs[i], atol=2e-5, rtol=0, msg=lambda m: f"{name}: {m}")
    for key, value in gradients.items():
        off = (got[2][key] - value).abs().max() / value.abs().max()
        assert off < 1e-4, f"{name}: gradient of {key} is off by {off:.1e} of its largest"


# borders of blocks: fused heads and shards that cut them (hidden 64, heads of 24, feed-forward 160), and that do not (128, 64, 256)
SHAPES = [dict(hidden_size=64, head_dim=24, intermediate_size=160, num_hidden_layers=2), dict(hidden_size=128, head_dim=64, intermediate_size=256, num_hidden_layers=2)]


@pytest.mark.parametrize("sizes", SHAPES)
def test_forward_and_gradients_are_those_of_rounded_operands_under_every_cut(sizes: dict[str, Any], tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", "qwen3", initializer_range=0.1, **sizes))
    for world, parallel in ((1, {}), (2, dict(tp=2)), (2, SEQUENCE), (2, dict(cp=2))):
        close(run_ranks(world, trained, directory, parallel)[0], directory, f"{sizes} {parallel}")


@pytest.mark.parametrize(("family", "world", "parallel"), [
    ("qwen2", 2, dict(tp=2)), ("qwen3_moe", 2, dict(SEQUENCE, ep=2, etp=1)), ("qwen3_moe", 2, SEQUENCE), ("deepseek_v3", 2, SEQUENCE), ("gpt_oss", 2, dict(SEQUENCE, etp=1))])
def test_weights_are_rounded_to_the_bits_that_the_sync_sends(family: str, world: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    """Matrices in blocks of their own, whatever Megatron fuses and tensor parallelism cuts; everything else is left as it is."""
    from safetensors.torch import load_file

    from resharding.fp8 import dequantise, quantise
    from resharding.layouts.fp8 import fp8_weights

    sizes = dict(hidden_size=192, head_dim=40) if family not in ("deepseek_v3", "qwen2") else dict(hidden_size=192)
    directory = write_model(tmp_path / "m", family, **sizes, num_hidden_layers=2)
    model, rounded = ModelConfig.from_directory(directory), run_ranks(world, trained, str(directory), parallel)[0][3]
    exact = run_ranks(1, trained, str(directory), {}, None)[0][3]
    matrices = fp8_weights(model)
    assert len(load_file(directory / "model.safetensors")) > 0 and matrices.keys() < exact.keys()
    for name, value in exact.items():
        want = dequantise(*quantise(value), dtype=torch.float32) if name in matrices else value
        assert torch.equal(rounded[name], want), name


def test_a_scale_that_stops_at_the_shard_is_caught(tmp_path: Path) -> None:
    """The fault that the exchange of block maxima is for: without it, what is computed depends on the layout."""
    directory = str(write_model(tmp_path / "m", "qwen3", initializer_range=0.1, **SHAPES[0]))
    with pytest.raises(AssertionError):
        close(run_ranks(2, without_exchange, directory)[0], directory, "no exchange")


def without_exchange(directory: str) -> Any:
    from unittest import mock

    from parallel import fp8_linear

    scale = fp8_linear._scale
    with mock.patch.object(fp8_linear, "_scale", lambda amax, *groups: scale(amax)):
        return trained(directory, dict(tp=2))


def test_training_in_fp8_learns(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", "qwen3", initializer_range=0.1, **SHAPES[1]))
    plain, fp8 = (run_ranks(1, trained, directory, {}, recipe, 8)[0][0] for recipe in (None, "blockwise"))
    assert fp8[-1] < 0.6 * fp8[0] and fp8[0] != plain[0], (plain, fp8)
    assert abs(fp8[-1] - plain[-1]) < 0.1 * (plain[0] - plain[-1]), (plain, fp8)


LLAMA = ModelConfig.from_hf({"model_type": "llama", **TINY, "hidden_size": 256, "intermediate_size": 512})
HOPPER, BLACKWELL, ADA = (Platform((2, 8), capability, (12, 9)) for capability in ((9, 0), (10, 0), (8, 9)))
CUDA = Device("cuda", "nccl")


def check(recipe: str | None, platform: Platform = HOPPER, implementation: str = "te", model: ModelConfig = LLAMA, dtype: torch.dtype = torch.bfloat16,
          **parallel: Any) -> None:
    check_fp8(recipe, implementation, model, ParallelConfig(**parallel), dtype, CUDA, platform)


def test_recipes_run_where_transformer_engine_runs_them() -> None:
    runs = {name: {recipe for recipe in RECIPES if not refused(recipe, platform)}
            for name, platform in (("hopper", HOPPER), ("blackwell", BLACKWELL), ("ada", ADA), ("ampere", Platform((2, 8), (8, 0), (12, 9))))}
    assert runs == {"hopper": {"delayed", "tensorwise", "blockwise"}, "blackwell": {"delayed", "tensorwise", "mxfp8"},
                    "ada": {"delayed", "tensorwise"}, "ampere": set()}


def refused(*arguments: Any, **named: Any) -> bool:
    try:
        check(*arguments, **named)
    except UserError:
        return True
    return False


@pytest.mark.parametrize(("recipe", "named", "words"), [
    ("mxfp8", {}, ["compute capability from 10.0 to below 12.0", "this one has 9.0", "recipes that run here: delayed, tensorwise, blockwise"]),
    ("blockwise", dict(platform=Platform((2, 2), (9, 0), (12, 9))), ["Transformer Engine 2.3 or later", "2.2 is installed"]),
    ("blockwise", dict(platform=Platform((2, 8), (9, 0), (12, 4))), ["CUDA 12.9 or later", "torch has 12.4"]),
    ("delayed", dict(platform=Platform(None, None, None)), ["Transformer Engine 1.11", "not installed", "no recipe runs here", "layer_implementation: torch emulates"]),
    ("delayed", dict(implementation="torch"), ["recipe of Transformer Engine", "layers are torch's", "fp8: blockwise"]),
    ("delayed", dict(dtype=torch.float32), ["bfloat16"]), ("nvfp4", {}, ["'nvfp4'", "delayed, tensorwise, blockwise, mxfp8"]),
    ("delayed", dict(model=ModelConfig.from_hf({"model_type": "llama", **TINY, "intermediate_size": 520})), ["intermediate_size is 520", "multiple of 16"]),
    ("mxfp8", dict(platform=BLACKWELL, model=ModelConfig.from_hf({"model_type": "llama", **TINY, "hidden_size": 80})), ["hidden_size is 80", "multiple of 32"])])
def test_what_a_recipe_lacks_is_said(recipe: str, named: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        check(recipe, **named)
    assert all(word in str(error.value) for word in words), error.value


def test_torch_layers_take_blockwise_and_none() -> None:
    for recipe in ("blockwise", None):
        check(recipe, Platform(None, None, None), "torch", dtype=torch.float32)


def recipes_of_megatron() -> list[tuple[Any, Any, bool]]:
    """In a rank: what Megatron's configuration makes of each recipe's fields."""
    from parallel.device import prepare_megatron
    from parallel.model import transformer_config

    prepare_megatron(Device("cpu", "gloo"))
    from unittest import mock

    out = []
    with mock.patch("parallel.model.rotary_scale", lambda model: 2.0):  # no fused rotary embedding, which needs Transformer Engine
        for recipe in RECIPES:
            config = transformer_config(LLAMA, ParallelConfig(), torch.bfloat16, "te", recipe)
            out.append((config.fp8, str(config.fp8_recipe), config.fp8_param))
    return out


def test_recipes_reach_megatron_by_its_own_names() -> None:
    assert run_ranks(1, recipes_of_megatron)[0] == [("hybrid", "delayed", False), ("hybrid", "tensorwise", False), ("e4m3", "blockwise", False), ("e4m3", "mxfp8", False)]
    assert te_options(None) == {}


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_rows_fill_transformer_engines_blocks_on_every_rank(packing: Any) -> None:
    parallel = ParallelConfig(tp=2, sequence_parallel=True, cp=2)
    batch, = make_micro_batches(SEQUENCES, [[0, 1, 2]], parallel, packing)
    filled = fill_up(batch, "blockwise", parallel)
    assert filled.tokens.shape[1] % (128 * 4) == 0 and filled.positions.shape == filled.tokens.shape
    assert torch.equal(filled.tokens.flatten()[filled.rows], batch.tokens.flatten()[batch.rows]) and filled.segments == batch.segments
