"""What the decoder tells attention and cache about a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Heads:
    """Attention of one layer on this tensor-parallel rank.

    `queries` query heads and `kv` key-value heads; a key has `key_dim` elements, a value `value_dim`. `scale` multiplies the
    scores. `window`: a token sees itself and the `window` - 1 tokens before it (None: all). `sinks` [queries]: a logit per head that
    takes part in the softmax and has no value (gpt_oss), fp32 or the weights' type. `latent` (multi-head latent attention, absorbed:
    DeepSeek-V2, arXiv:2405.04434, 2.1.2): there is one key-value head and its value is the first `value_dim` elements of its key, so
    only keys are cached and `v` is None.
    """

    queries: int
    kv: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None
    latent: bool = False
