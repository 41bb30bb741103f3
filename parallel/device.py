"""The device seam: CUDA with NCCL, or CPU with gloo."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallel.errors import UserError


@dataclass(frozen=True)
class Device:
    """Where this rank computes. `backend` is the torch.distributed backend for its tensors."""

    type: str
    backend: str
    index: int = 0

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu") if self.type == "cpu" else torch.device("cuda", self.index)


def select_device(name: str = "auto", local_rank: int = 0) -> Device:
    """`auto` takes CUDA where there is one. Raises UserError where CUDA is asked for and missing."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"run.device is {name!r}; allowed: auto, cpu, cuda")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("run.device is cuda, but torch sees no CUDA device; install a CUDA build of torch or set run.device=cpu")
    if name == "cpu" or not available:
        return Device("cpu", "gloo")
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"local rank {local_rank} has no GPU of its own: this host shows {torch.cuda.device_count()}; start fewer ranks per host")
    return Device("cuda", "nccl", local_rank)


def prepare_dtype(dtype: torch.dtype, device: Device) -> None:
    """Make products of `dtype` usable on `device`; called where a model or an engine of that type is built."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        from parallel import bf16_cpu

        bf16_cpu.install_where_missing()


def prepare_megatron(device: Device) -> None:
    """Make Megatron-Core usable on `device`; call once per process before models are built.

    The CPU adaptation is imported only for the CPU. Where neither Transformer Engine nor apex brings a fused Adam, ours
    (same state shape) takes its place on either device: with torch's own, resuming the distributed optimizer is wrong.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index)
    else:
        from parallel import cpu_adaptation

        cpu_adaptation.adapt()
    from parallel import adamw

    adamw.install_where_missing()
