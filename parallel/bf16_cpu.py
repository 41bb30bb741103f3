"""bfloat16 matrix products on CPUs without bfloat16 instructions: computed in float32, rounded once at the end.

torch's own kernels there reach 1 to 20 GFLOP/s on a core that does 50 to 80 in float32 (a gradient `g @ w` is the slowest).
Operands become float32 without loss and sums are float32 either way, so results are as exact as before.
"""

from __future__ import annotations

import platform
import warnings

import torch
from torch import Tensor

_library: torch.library.Library | None = None


def lacks_bf16() -> bool:
    """Whether this is an x86 CPU with neither AVX-512 bfloat16 nor AMX."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def install_where_missing() -> None:
    """Put the float32 products in place of torch's bfloat16 ones on the CPU, where the CPU lacks bfloat16."""
    global _library
    if _library is None and lacks_bf16():
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch says that a kernel is replaced, which is the purpose
            warnings.simplefilter("ignore", UserWarning)
            _library.impl("mm", _mm, "CPU")
            _library.impl("addmm", _addmm, "CPU")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    # the variants with `out` are kernels of their own, so they lead to torch's and not back here
    if a.dtype == torch.bfloat16 == b.dtype:
        return torch.mm(a.float(), b.float(), out=a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)).to(torch.bfloat16)
    return torch.mm(a, b, out=a.new_empty(0))


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if a.dtype == torch.bfloat16 == b.dtype == bias.dtype:
        out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
        return torch.addmm(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha, out=out).to(torch.bfloat16)
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))
