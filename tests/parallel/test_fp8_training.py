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


def expected(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient of one matrix on rounded operands."""
    x, w, g = rounded_rows(x), by_hand(weight, 128, 128), rounded_rows(grad)
    return x @ w.T, g @ w, g.T @ x


def layer_errors(directory: str, parallel: dict[str, Any], fault: str | None = None) -> dict[str, float]:
    """On a rank: of each linear layer of a decoder layer the largest error of output and gradients, over the largest expected value.

    Inputs and output gradients are drawn, so that both sides round the same bits: there is no tolerance for what lies at a border.
    """
    import torch.distributed as dist
    from safetensors.torch import load_file

    with planted(fault):
        training = opened(directory, parallel, "blockwise")
    weights = {n.removeprefix("model.layers.0."): w for n, w in load_file(Path(directory) / "model.safetensors").items() if "layers.0." in n}
    model, tp, rank = training.model, training.parallel.tp, training.at.tp
    layer, groups, out = training.modules[0].decoder.layers[0], model.num_kv_heads, {}
    parts = {"self_attention.linear_qkv": "q k v", "self_attention.linear_proj": "o", "mlp.linear_fc1": "gate up", "mlp.linear_fc2": "down"}

    def cut(t: Tensor, dim: int) -> Tensor:
        return t.chunk(tp, dim)[rank]

    def fuse(name: str, tensors: list[Tensor]) -> Tensor:
        """Last dimensions of several matrices' outputs as this rank's of Megatron's fused one."""
        if name.endswith("qkv"):
            return cut(torch.cat([t.unflatten(-1, (groups, -1)) for t in tensors], -1), -2).flatten(-2)
        return torch.cat([cut(t, -1) for t in tensors], -1)

    for name, words in parts.items():
        torch.manual_seed(len(name))
        matrices = [next(w for n, w in weights.items() if n.endswith(f".{word}_proj.weight")) for word in words.split()]
        linear = layer.get_submodule(name)
        x = torch.randn(12, 1, matrices[0].shape[1]) * torch.logspace(-2, 2, 12)[:, None, None]
        grads = [torch.randn(12, 1, m.shape[0]) for m in matrices]
        wants = [expected(x.flatten(0, 1), m, g.flatten(0, 1)) for m, g in zip(matrices, grads, strict=True)]
        column, sequence = len(matrices) > 1, training.parallel.sequence_parallel
        mine = (cut(x, 0) if sequence else x) if column else cut(x, -1)
        mine = mine.contiguous().requires_grad_()
        grad = fuse(name, grads) if column else (cut(grads[0], 0) if sequence else grads[0])
        with planted(fault), training.entered():
            y, _ = linear(mine)
            got_x, got_w = torch.autograd.grad(y, [mine, linear.weight], grad.contiguous())
        want_x = torch.stack([w[1] for w in wants]).sum(0).view_as(x)
        if column:
            want_y, want_x = fuse(name, [w[0] for w in wants]), cut(want_x, 0) if sequence else want_x
            want_w = fuse(name, [w[2].T for w in wants]).T
        else:
            want_y, want_x, want_w = cut(wants[0][0], 0) if sequence else wants[0][0], cut(want_x, -1), cut(wants[0][2], 1)
        for what, got, want in (("output", y, want_y), ("input", got_x, want_x), ("weight", got_w, want_w)):
            out[f"{name} {what}"] = ((got.reshape(want.shape) - want).abs().max() / want.abs().max()).item()
    dist.barrier()
    return out


def opened(directory: str, parallel: dict[str, Any], fp8: str | None) -> Any:
    """On a rank: a trained model with the weights of a directory."""
    import torch.distributed as dist

    from checkpoint.hf import read_hf
    from parallel.device import prepare_megatron
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
    return training


def planted(fault: str | None) -> Any:
    from contextlib import nullcontext
    from unittest import mock

    from parallel import fp8_linear

    scale, forward = fp8_linear._scale, fp8_linear._Rounded.forward
    return {None: lambda: nullcontext(),
            "scales that stop at the shard": lambda: mock.patch.object(fp8_linear, "_scale", lambda amax, *groups: scale(amax)),
            "gradients not rounded": lambda: mock.patch.object(fp8_linear._RoundedGradient, "backward", staticmethod(lambda ctx, grad: (grad, None))),
            "blocks of the fused weight": lambda: mock.patch.object(
                fp8_linear, "_fused", lambda model, name, size, ranks: (torch.arange(size) // 128).view(ranks, -1)),
            "weights not rounded": lambda: mock.patch.object(fp8_linear._Rounded, "forward", staticmethod(
                lambda ctx, x, round_: x.clone() if round_.func is fp8_linear.rounded_weight else forward(ctx, x, round_)))}[fault]()


def trained(directory: str, parallel: dict[str, Any], fp8: str | None = "blockwise", steps: int = 0) -> Any:
    """On a rank: (losses of steps, what the linear layers round their weights to before them, canonical)."""
    from parallel.fp8_linear import _linears, rounded_weight
    from parallel.packing import Batching, plan_micro_batches

    training = opened(directory, parallel, fp8)
    values = dict(training.tensors)
    if fp8:
        for name, linear in _linears(training.modules[0]):
            values[f"decoder.layers.{name}.weight"] = rounded_weight(linear.weight, *linear._forward_impl.args[1:3])
    rounded = gathered(training, values)
    count = sum(len(s) - 1 for s in SEQUENCES)

    def loss(batch: Any, log_probs: Tensor, entropy: Tensor) -> Any:
        return -log_probs.sum() / count, {"loss": -log_probs.sum().item() / count}

    losses = []
    plan = plan_micro_batches(SEQUENCES, range(len(SEQUENCES)), None, 2, Batching(), training.model, training.parallel, 1)
    for _ in range(steps):
        outputs = training.forward_backward(make_micro_batches(SEQUENCES, plan[0], training.parallel), loss)
        losses.append(sum(output["loss"] for output in outputs))
        training.optimizer_step()
    return losses, rounded


# borders of blocks: fused heads and shards that cut them (hidden 64, heads of 24, feed-forward 160), and that do not (128, 64, 256)
SHAPES = [dict(hidden_size=64, head_dim=24, intermediate_size=160, num_hidden_layers=2), dict(hidden_size=128, head_dim=64, intermediate_size=256, num_hidden_layers=2)]


@pytest.mark.parametrize("sizes", SHAPES)
def test_products_are_those_of_rounded_operands_under_every_cut(sizes: dict[str, Any], tmp_path: Path) -> None:
    """The unsplit matrices' scales, whether shards cut their blocks or not."""
    directory = str(write_model(tmp_path / "m", "qwen3", initializer_range=0.1, **sizes))
    for world, parallel in ((1, {}), (2, dict(tp=2)), (2, SEQUENCE)):
        for errors in run_ranks(world, layer_errors, directory, parallel):
            assert len(errors) == 12 and max(errors.values()) < 2e-6, (parallel, errors)


@pytest.mark.parametrize(("fault", "parallel"), [("scales that stop at the shard", dict(tp=2)), ("gradients not rounded", {}), ("weights not rounded", {}),
                                                 ("blocks of the fused weight", {})])
def test_faults_in_rounding_are_caught(fault: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", "qwen3", initializer_range=0.1, **SHAPES[0]))
    errors = run_ranks(parallel.get("tp", 1), layer_errors, directory, parallel, fault)[0]
    assert max(errors.values()) > 1e-3, errors


@pytest.mark.parametrize(("family", "world", "parallel"), [
    ("qwen2", 2, dict(tp=2)), ("qwen3_moe", 2, dict(SEQUENCE, ep=2, etp=1)), ("qwen3_moe", 2, SEQUENCE), ("deepseek_v3", 2, SEQUENCE), ("glm4_moe", 2, SEQUENCE)])
def test_weights_are_rounded_to_the_bits_that_the_sync_sends(family: str, world: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    """Matrices in blocks of their own, whatever Megatron fuses and tensor parallelism cuts; everything else is left as it is."""
    from resharding.fp8 import dequantise, quantise
    from resharding.layouts.fp8 import fp8_weights

    sizes = dict(hidden_size=192, head_dim=40) if family not in ("deepseek_v3", "qwen2") else dict(hidden_size=192)
    directory = write_model(tmp_path / "m", family, **sizes, num_hidden_layers=2)
    rounded, exact = (run_ranks(n, trained, str(directory), cut, recipe)[0][1] for n, cut, recipe in ((world, parallel, "blockwise"), (1, {}, None)))
    matrices = fp8_weights(ModelConfig.from_directory(directory))
    assert matrices.keys() < exact.keys()
    for name, value in exact.items():
        want = dequantise(*quantise(value), dtype=torch.float32) if name in matrices else value
        assert torch.equal(rounded[name], want), name


def test_training_in_fp8_learns_and_is_not_training_without(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", "qwen3", initializer_range=0.1, **SHAPES[1]))
    plain, fp8 = (run_ranks(1, trained, directory, {}, recipe, 8)[0][0] for recipe in (None, "blockwise"))
    assert fp8[-1] < 0.6 * fp8[0] and 1e-4 < abs(fp8[0] - plain[0]) < 0.1, (plain, fp8)
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
    from parallel.options import TrainingOptions

    prepare_megatron(Device("cpu", "gloo"))
    from unittest import mock

    out = []
    with mock.patch("parallel.model.rotary_scale", lambda model: 2.0):  # no fused rotary embedding, which needs Transformer Engine
        for recipe in RECIPES:
            config = transformer_config(LLAMA, ParallelConfig(), torch.bfloat16, "te", TrainingOptions(fp8=recipe))
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
