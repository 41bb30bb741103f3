"""What the tests of families share: directories of tiny models, transformers' log-probs and gradients, and ours on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.models import write_model

# longer than every tiny sliding window; of different lengths, so that padding is there too
SEQUENCES = [[(11 * i + 7 * s) % 200 + 1 for i in range(n)] for s, n in enumerate((14, 11, 9, 12))]


def reference(directory: Path, gradients: Path) -> list[torch.Tensor]:
    """transformers: log-probs [tokens - 1] of every sequence; the gradients of minus their mean go to `gradients`, as a model directory."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    rows = [model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
            for ids in SEQUENCES]
    (-torch.cat(rows).mean()).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(gradients)
    return [row.detach() for row in rows]


@dataclass(frozen=True)
class Written:
    """A model directory, one that holds transformers' gradients in the weights' place, and its log-probs of `SEQUENCES`."""

    directory: str
    gradients: str
    log_probs: list[torch.Tensor]


def write(root: Path, family: str, name: str, **changes: Any) -> Written:
    """A model at a large initial std, where faults show."""
    directory = write_model(root / name, family, **{"initializer_range": 0.3, **changes})
    return Written(str(directory), str(root / f"{name}-gradients"), reference(directory, root / f"{name}-gradients"))


def log_probs_and_gradients(cases: list[tuple[str, str]], parallel: dict[str, Any], size: int = 2, **batching: Any) -> Any:
    """On a rank, for every (model, gradients) directory: (log-probs by sequence where this rank reports, {tensor: gradient's error}).

    The error is the largest difference from the expected gradient in this rank's own layout, over the largest expected value.
    """
    import torch.distributed as dist

    from checkpoint.hf import read_hf
    from parallel.config import ParallelConfig
    from parallel.device import Device, prepare_megatron
    from parallel.micro_batch import make_micro_batches
    from parallel.model_config import ModelConfig
    from parallel.packing import Batching, plan_micro_batches
    from parallel.training import OptimizerConfig, build
    from resharding.layout import empty_tensors
    from resharding.layouts import mcore_layout

    device, rank, world, out = Device("cpu", "gloo"), dist.get_rank(), dist.get_world_size(), []
    prepare_megatron(device)
    for directory, gradients in cases:
        model = ModelConfig.from_directory(directory, make_vocab_size_divisible_by=8)
        config = ParallelConfig(**parallel)
        config.validate(world, model)
        training = build(model, config, "float32", device, rank, world, 7, OptimizerConfig(distributed=False))
        layout = mcore_layout(model, config, rank, world, torch.float32)
        read_hf(directory, layout, training.tensors, model)
        before = {n: t.clone() for n, t in training.tensors.items() if n.endswith("expert_bias")}
        count = sum(len(s) - 1 for s in SEQUENCES)

        def loss(micro_batch: Any, log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:
            rows = dict(zip(micro_batch.indices, micro_batch.split(log_probs), strict=True))
            return -sum(row.sum() for row in rows.values()) / count + 0.0 * log_probs.sum(), {i: row.detach() for i, row in rows.items()}

        plan = plan_micro_batches(SEQUENCES, range(len(SEQUENCES)), None, size, Batching(**batching), model, config, config.dp(world))
        batches = make_micro_batches(SEQUENCES, plan[training.at.dp], config, Batching(**batching).packing)
        outputs = training.forward_backward(batches, loss)
        expected = empty_tensors(layout)
        read_hf(gradients, layout, expected, model)
        several = len(training.modules) > 1
        got = {(f"chunk{i}." if several else "") + n: p.main_grad for i, m in enumerate(training.modules) for n, p in m.named_parameters()}
        assert set(expected) - set(got) == set(before) and all(torch.equal(training.tensors[n], t) for n, t in before.items())
        errors = {n: ((g - expected[n]).abs().max() / expected[n].abs().max().clamp_min(1e-12)).item() for n, g in got.items()}
        reported = {i: row for output in outputs for i, row in output.items()} if training.is_output_rank else {}
        out.append((reported, errors))
    return out


def with_fault(cases: list[tuple[str, str, str]], parallel: dict[str, Any]) -> list[dict[str, float]]:
    """On a rank: the gradients' errors of every (fault, model, gradients), with the fault put in."""
    out = []
    for fault, *directories in cases:
        with fault_of(fault):
            (_, errors), = log_probs_and_gradients([tuple(directories)], parallel)  # type: ignore[list-item]
        out.append(errors)
    return out


def fault_of(name: str) -> Any:
    """A context in which models are built, or run, with the fault."""
    from parallel import attention, megatron_modules, model
    from parallel.device import Device, prepare_megatron
    from parallel.routing import choose_experts

    prepare_megatron(Device("cpu", "gloo"))
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.moe.moe_utils import group_limited_topk

    def megatrons_groups(logits: torch.Tensor, moe: Any, bias: Any = None, replay: Any = None) -> Any:
        scores = logits.softmax(-1)
        _, indices = group_limited_topk(scores, moe.top_k, len(scores), moe.num_experts, moe.groups, moe.top_groups)
        return scores.gather(1, indices) * moe.scaling, indices

    original = attention.SDPACoreAttention.__init__

    def changed(change: Any) -> Any:
        def init(self: Any, *arguments: Any, **named: Any) -> None:
            original(self, *arguments, **named)
            change(self)

        return mock.patch.object(attention.SDPACoreAttention, "__init__", init)

    def no_sinks(core: Any, *arguments: Any) -> Any:
        core.softmax_offset.data.fill_(-1e4)

    return {
        "latent attention as Megatron has it": lambda: mock.patch.object(model, "whole_along_sequence", lambda module, inputs, output: None),
        "expert biases summed over tp": lambda: mock.patch.object(megatron_modules.BiasedRowLinear, "__init__", RowParallelLinear.__init__),
        "window one too long": lambda: changed(lambda core: setattr(core, "window", core.window and core.window + 1)),
        "sinks left out": lambda: changed(lambda core: core.register_forward_pre_hook(no_sinks)),
        "no correction bias": lambda: mock.patch.object(megatron_modules, "choose_experts", lambda logits, moe, bias=None, replay=None: choose_experts(logits, moe)),
        "Megatron's choice of groups": lambda: mock.patch.object(megatron_modules, "choose_experts", megatrons_groups),
    }[name]()
