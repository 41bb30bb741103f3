"""The CPU adaptation is confined to Megatron-Core, refuses versions it does not know, and stays away from CUDA."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.worker_pool import run_ranks


def adapted_world() -> dict[str, Any]:
    """In a rank: what the user's torch looks like once Megatron-Core is adapted."""
    names = ("current_device", "synchronize", "Stream", "Event", "get_rng_state")
    before = {n: getattr(torch.cuda, n) for n in names}
    factories = {n: getattr(torch, n) for n in ("zeros", "empty", "tensor")}
    methods = (torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda)
    from parallel.device import Device, prepare_megatron

    prepare_megatron(Device("cpu", "gloo"))
    from megatron.core.tensor_parallel import mappings

    return {
        "same_cuda": all(getattr(torch.cuda, n) is f for n, f in before.items()),
        "same_factories": all(getattr(torch, n) is f for n, f in factories.items()),
        "same_methods": methods == (torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda),
        "megatron_sees_cpu": str(mappings.torch.zeros(2, device="cuda").device), "device": str(mappings.torch.cuda.current_device()),
        "tensor_class": mappings.torch.Tensor is torch.Tensor,
    }


def test_the_users_torch_is_left_alone() -> None:
    (seen,) = run_ranks(1, adapted_world)
    assert seen == {"same_cuda": True, "same_factories": True, "same_methods": True, "megatron_sees_cpu": "cpu", "device": "cpu", "tensor_class": True}


def other_version() -> str:
    import megatron.core

    from parallel import cpu_adaptation
    from parallel.errors import UserError

    kept, cpu_adaptation._adapted = megatron.core.__version__, False
    megatron.core.__version__ = "0.99.0"
    try:
        cpu_adaptation.adapt()
    except UserError as error:
        return str(error)
    finally:
        megatron.core.__version__, cpu_adaptation._adapted = kept, True
    return "adapted"


def test_an_unknown_version_is_refused() -> None:
    (text,) = run_ranks(1, other_version)
    assert "0.99.0" in text and "0.16" in text


def test_it_is_never_imported_where_cuda_is_used() -> None:
    """prepare_megatron for a CUDA device, with the device call itself faked: the module must not be loaded."""
    code = ("import sys, torch; torch.cuda.set_device = lambda i: None\n"
            "from parallel.device import Device, prepare_megatron\n"
            "prepare_megatron(Device('cuda', 'nccl', 0))\n"
            "print('parallel.cpu_adaptation' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def clipped(parameters: list[torch.Tensor], max_norm: float, total: float) -> list[torch.Tensor]:
    from parallel.cpu_adaptation import clip_grad_by_total_norm_fp32

    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in parameters]
    for p, g in zip(params, parameters, strict=True):
        p.grad = g.clone()
    clip_grad_by_total_norm_fp32(params, max_norm, total)
    return [p.grad for p in params]


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_equals_torch(max_norm: float) -> None:
    grads = [torch.randn(4, 3), torch.randn(7)]
    total = torch.cat([g.flatten() for g in grads]).norm().item()
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    for got, p in zip(clipped(grads, max_norm, total), params, strict=True):
        torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-7)
