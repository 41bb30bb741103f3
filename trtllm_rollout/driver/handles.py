"""Tensors that another process on the same GPU opens: CUDA IPC handles, in the two forms that workers take."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from resharding.transport.cuda_ipc import DEVICE_ARGUMENT

Handle = tuple[Any, tuple[Any, ...]]  # what rebuilds the tensor, and with which arguments


def make_handles(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, Handle]]:
    """(name, handle) of every tensor. The tensors must outlive their use, unchanged: an allocator that reuses their memory would change
    what the other process reads."""
    for tensor in tensors.values():
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
            break
    return [(name, reduce_tensor(tensor.detach())) for name, tensor in tensors.items()]


def encode(handles: Sequence[tuple[str, Handle]]) -> str:
    """The form of TensorRT-LLM's `update_weights`: the pickled list in base64."""
    return base64.b64encode(pickle.dumps(list(handles))).decode()


def open_handles(handles: Iterable[tuple[str, Handle]], device_id: int) -> dict[str, torch.Tensor]:
    """The tensors, on the device that this process knows as `device_id`."""
    out: dict[str, torch.Tensor] = {}
    for name, (rebuild, arguments) in handles:
        if rebuild is rebuild_cuda_tensor:
            arguments = (*arguments[:DEVICE_ARGUMENT], device_id, *arguments[DEVICE_ARGUMENT + 1:])
        out[name] = rebuild(*arguments)
    return out
