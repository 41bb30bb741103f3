"""Rotary positions: tables, and the rotation of queries and keys in place."""

from __future__ import annotations

import torch

from parallel.model_config import ModelConfig
from parallel.rope import inverse_frequencies, rotary_scale


def rotary_tables(model: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, rotated columns / 2], times the scale that YaRN has; computed in fp32."""
    frequencies = inverse_frequencies(model).to(device)
    angles = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequencies
    scale = rotary_scale(model)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, side_by_side: bool = False) -> None:
    """Rotate x [rows, heads, columns] in place by cos and sin [rows, 1, columns / 2].

    The two columns of a pair are half the columns apart, or `side_by_side` (DeepSeek). Neighbours stay in their places: queries and keys
    are turned alike, and no score depends on the order of columns.
    """
    a, b = (x[..., ::2], x[..., 1::2]) if side_by_side else x.chunk(2, dim=-1)
    turned = (a * cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(a, sin)
    a.copy_(turned)
