"""bfloat16 products in float32: the rounded exact product, gradients too, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch
from parallel import bf16_cpu
torch.manual_seed(0)
x, w, b = torch.randn(5, 7, 33), torch.randn(19, 33), torch.randn(19)
before = [torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, w, b), x[0] @ w.t()]
bf16_cpu.lacks_bf16 = lambda: True
bf16_cpu.install_where_missing()
bf16_cpu.install_where_missing()
after = [torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, w, b), x[0] @ w.t()]
assert all(torch.equal(p, q) for p, q in zip(before, after))
X, W, B = (t.bfloat16().requires_grad_() for t in (x, w, b))
want = torch.nn.functional.linear(X.double(), W.double(), B.double())
got = torch.nn.functional.linear(X, W, B)
assert got.dtype == torch.bfloat16 and torch.allclose(got.double(), want, rtol=2 ** -8, atol=1e-6)
assert torch.equal(got.detach(), torch.nn.functional.linear(X.float(), W.float(), B.float()).bfloat16())
g = torch.randn_like(got)
ours = torch.autograd.grad(got, (X, W, B), g)
exact = torch.autograd.grad(want, (X, W, B), g.double())
assert all(o.dtype == torch.bfloat16 and torch.allclose(o.double(), e.double(), rtol=2 ** -7, atol=1e-2) for o, e in zip(ours, exact))
with torch.inference_mode():
    assert torch.equal(torch.nn.functional.linear(X.detach(), W.detach()), torch.nn.functional.linear(X.detach().float(), W.detach().float()).bfloat16())
"""


def test_products_are_the_rounded_exact_ones() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
