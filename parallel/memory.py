"""Memory of this process: what it holds and held at most, and freed memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def give_back_freed() -> None:
    """glibc and CUDA's caching allocator keep freed memory for themselves; make them give it back. Other C libraries have no such call."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident(device: torch.device) -> int | None:
    """Bytes in use now: this process's tensors on a GPU, or its resident memory on the CPU. None where the system does not say."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def forget_peak(device: torch.device) -> None:
    """Let `peak` start from what is in use now, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")  # proc(5): resets the high-water mark of resident memory


def peak(device: torch.device) -> int | None:
    """Most bytes in use since `forget_peak`, counted as `resident` counts. None where the system does not say."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int | None:
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith(key + ":")]
    return int(found[0]) * 1024 if found else None
