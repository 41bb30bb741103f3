"""Dense attention with its log-sum-exp, one function a backend, and which backend a layer gets."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from trtllm_rollout.embedded.heads import Heads

HIDDEN = -1e30  # a score that no softmax sees; finite, so that a part of which nothing is seen gives no NaN

# (q [kv, rows, key_dim], k [kv, tokens, key_dim], v [kv, tokens, value_dim], bias [rows, tokens] of 0 and HIDDEN, scale)
#   -> attention [kv, rows, value_dim] and log-sum-exp [kv, rows] fp32
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def by_matrix_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition. Scores are fp32; their softmax takes the type of the values for the second product, as flash attention does."""
    scores = product(q * scale, k.transpose(1, 2)) + bias
    return product(torch.softmax(scores, -1).to(v.dtype), v), torch.logsumexp(scores, -1)


def by_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's fused attention: on the CPU its flash kernel, on CUDA its memory-efficient one; both also give the log-sum-exp."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[None], k[None], v[None], 0.0, False, attn_mask=bias, scale=scale)
        return out[0], lse[0]
    room = F.pad(bias, (0, -bias.shape[1] % 16)).to(q.dtype)[:, :bias.shape[1]]  # the kernel wants rows of the bias aligned
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q[None], k[None], v[None], room.expand(1, len(q), -1, -1), True, 0.0,
                                                                            False, scale=scale)
    return out[0], lse[0, :, :q.shape[1]]


def by_flashinfer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's single-sequence prefill (`flashinfer.single_prefill_with_kv_cache`), whose log-sum-exp is to base 2."""
    import flashinfer

    out, lse = flashinfer.single_prefill_with_kv_cache(q.transpose(0, 1).contiguous(), k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(),
                                                       custom_mask=bias == 0, sm_scale=scale, return_lse=True)
    return out.transpose(0, 1), lse.transpose(0, 1) * math.log(2)


BACKENDS: dict[str, Attend] = {"sdpa": by_sdpa, "flashinfer": by_flashinfer, "latent": by_matrix_products}


def choose(heads: Heads, device: torch.device) -> tuple[str, str]:
    """The backend of a layer and why."""
    if heads.latent or heads.key_dim != heads.value_dim:
        return "latent", f"keys have {heads.key_dim} elements and values {heads.value_dim}, which only plain matrix products take"
    if device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None and heads.key_dim in (64, 128, 256):
        return "flashinfer", "it is installed and the device is CUDA"
    why = "the device is not CUDA" if device.type != "cuda" else "flashinfer is not installed, or has no kernel for this head size"
    return "sdpa", f"{why}; torch's own kernel gives the log-sum-exp"


def choose_all(heads: Sequence[Heads], device: torch.device) -> list[Attend]:
    """The backend of every layer; each distinct choice is logged once."""
    chosen = [choose(h, device) for h in heads]
    for name, why in dict.fromkeys(chosen):
        logging.getLogger(__name__).debug("attention backend %s for %d of %d layers: %s", name, chosen.count((name, why)), len(chosen), why)
    return [BACKENDS[name] for name, _ in chosen]


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Batched matrix product with fp32 results."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    result = torch.bmm(a, b, out_dtype=torch.float32)
    return result if out is None else out.copy_(result)
