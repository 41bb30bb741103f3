"""What Megatron-Core runs silently wrong is refused, item by item, and what the product builds is not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.micro_batch import make_micro_batches
from parallel.model_config import ModelConfig
from parallel.silent_faults import refuse_config, refuse_modules, refuse_optimizer, refuse_ragged
from tests.models import FAMILY_TINY, TINY
from tests.worker_pool import run_ranks

LAYOUTS = [("llama", {}), ("llama", dict(tp=2)), ("llama", dict(pp=2, vpp=2)), ("llama", dict(pp=2)), ("deepseek_v3", dict(tp=2, sequence_parallel=True)),
           ("qwen3_moe", dict(tp=2, sequence_parallel=True, ep=2, etp=1)), ("llama", dict(cp=2)), ("gpt_oss", {})]
# (family, layout, what is changed in the product's configuration, words of the refusal)
FAULTS = [
    ("llama", dict(pp=2, vpp=2), dict(batch_p2p_comm=True), ["pp 2 with vpp", "batch_p2p_comm=False"]),
    ("llama", dict(pp=2, vpp=2), dict(variable_seq_lengths=True), ["variable_seq_lengths", "one shape"]),
    ("deepseek_v3", dict(tp=2, sequence_parallel=True), dict(sequence_parallel=False), ["latent attention", "sequence_parallel=True or tp=1"]),
    ("qwen3_moe", dict(tp=2, sequence_parallel=True), dict(sequence_parallel=False), ["experts", "sequence_parallel=True or tp=1"]),
    ("llama", dict(tp=2), dict(perform_initialization=False), ["gradient norm", "leave it on"]),
    ("llama", {}, dict(calculate_per_token_loss=False), ["depend on the split", "set it to True"]),
]


def configurations() -> list[str | None]:
    """In a rank: the refusal of every layout of the product (None), then of every fault."""
    from parallel.device import Device, prepare_megatron
    from parallel.model import transformer_config

    prepare_megatron(Device("cpu", "gloo"))
    out: list[str | None] = []
    for family, layout, changes, _ in [*((f, p, {}, None) for f, p in LAYOUTS), *FAULTS]:
        model = ModelConfig.from_hf({"model_type": family, **TINY, **FAMILY_TINY.get(family, {})})
        config = transformer_config(model, ParallelConfig(**layout), torch.float32, "torch")
        for name, value in changes.items():
            setattr(config, name, value)
        try:
            refuse_config(config)
            out.append(None)
        except UserError as error:
            out.append(str(error))
    return out


def test_configurations_that_train_wrongly_are_refused_and_the_products_own_are_not() -> None:
    got = run_ranks(1, configurations)[0]
    assert got[:len(LAYOUTS)] == [None] * len(LAYOUTS)
    for text, (_, _, changes, words) in zip(got[len(LAYOUTS):], FAULTS, strict=True):
        assert text is not None and all(word in text for word in words), (changes, text)


def test_the_interleaved_schedule_with_three_stages_may_batch_its_messages() -> None:
    config = SimpleNamespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, batch_p2p_comm=True, variable_seq_lengths=False,
                             tensor_model_parallel_size=1, sequence_parallel=False, num_moe_experts=None, perform_initialization=True,
                             calculate_per_token_loss=True)
    refuse_config(config)


def built(family: str, layout: dict[str, Any], fault: str | None) -> str | None:
    """On a rank: what a build with the fault put in says."""
    from unittest import mock

    import torch.distributed as dist

    from parallel import device, model, training

    device.prepare_megatron(device.Device("cpu", "gloo"))
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    patches: dict[str | None, list[Any]] = {
        None: [], "hook": [mock.patch.object(torch.nn.Module, "register_forward_hook", lambda *a, **k: None)],
        "experts": [mock.patch.object(model, "_reduce_as_experts", lambda module: None)],
        "adam": [mock.patch.object(optimizer, "Adam", torch.optim.AdamW), mock.patch.object(distributed, "Adam", torch.optim.AdamW),
                 mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", True), mock.patch.object(distributed, "USING_APEX_OPTIMIZER", False)]}
    for patch in patches[fault]:
        patch.start()
    try:
        c = ModelConfig.from_hf({"model_type": family, **TINY, **FAMILY_TINY.get(family, {}), "num_hidden_layers": 2}, make_vocab_size_divisible_by=8)
        training.build(c, ParallelConfig(**layout), "float32", device.Device("cpu", "gloo"), dist.get_rank(), dist.get_world_size(), 1,
                       training.OptimizerConfig())
    except UserError as error:
        return str(error)
    finally:
        for patch in patches[fault]:
            patch.stop()
    return None


@pytest.mark.parametrize(("family", "layout", "fault", "words"), [
    ("deepseek_v3", dict(tp=2, sequence_parallel=True), "hook", ["linear_kv_down_proj", "rotary part", "whole_along_sequence"]),
    ("qwen3_moe", dict(tp=2, sequence_parallel=True, etp=1), "experts", ["etp 1 and tp 2", "allreduce=False"]),
    ("llama", {}, "adam", ["torch's AdamW", "step counts", "prepare_megatron"])])
def test_a_build_that_lost_its_repair_is_refused(family: str, layout: dict[str, Any], fault: str, words: list[str]) -> None:
    world = 2 if layout else 1
    assert run_ranks(world, built, family, layout, None) == [None] * world
    for text in run_ranks(world, built, family, layout, fault):
        assert text is not None and all(word in text for word in words), text


def test_ragged_micro_batches_are_refused_where_a_pipeline_was_not_told() -> None:
    ids = [[1] * 9, [1] * 5, [1] * 7]
    ragged = make_micro_batches(ids, [[0], [1], [2]], ParallelConfig(pp=2))
    told = SimpleNamespace(pipeline_model_parallel_size=2, variable_seq_lengths=True)
    refuse_ragged(told, ragged, 1)
    with pytest.raises(UserError, match=r"3 shapes, \[1, 4\] to \[1, 8\].*variable_seq_lengths=True"):
        refuse_ragged(SimpleNamespace(pipeline_model_parallel_size=2, variable_seq_lengths=False), ragged, 1)
    with pytest.raises(UserError, match="interleaved stages .vpp. take one shape only"):
        refuse_ragged(SimpleNamespace(pipeline_model_parallel_size=2, variable_seq_lengths=False), ragged, 2)
    interleaved = make_micro_batches(ids, [[0], [1], [2]], replace(ParallelConfig(pp=2), vpp=2))
    refuse_ragged(SimpleNamespace(pipeline_model_parallel_size=2, variable_seq_lengths=False), interleaved, 2)


def test_refusals_look_at_what_they_name_only() -> None:
    refuse_optimizer(SimpleNamespace(optimizer=torch.optim.AdamW([torch.zeros(1, requires_grad=True)])))  # not the distributed one
    refuse_modules(SimpleNamespace(num_moe_experts=None, tensor_model_parallel_size=2), [torch.nn.Linear(2, 2)], "torch")
