"""Memory that was freed, back to the system."""

from __future__ import annotations

import ctypes
import gc

import torch


def give_back_freed() -> None:
    """glibc and CUDA's caching allocator keep freed memory for themselves; make them give it back. Other C libraries have no such call."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
