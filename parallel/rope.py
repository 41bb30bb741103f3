"""Rotary inverse frequencies, with llama3 scaling."""

from __future__ import annotations

import math

import torch

from parallel.model_config import ModelConfig


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Inverse frequencies [head_dim / 2] in fp32.

    llama3 scaling follows transformers `modeling_rope_utils._compute_llama3_parameters`: long wavelengths are divided by
    `factor`, short ones kept, those between interpolated.
    """
    d = model.head_dim
    inv_freq = 1.0 / (model.rope_theta ** (torch.arange(0, d, 2, dtype=torch.int64).to(torch.float32) / d))
    s = model.rope_scaling
    if s is None:
        return inv_freq
    low = s.original_max_position_embeddings / s.low_freq_factor
    high = s.original_max_position_embeddings / s.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > low, inv_freq / s.factor, inv_freq)
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    between = (1 - smooth) * scaled / s.factor + smooth * scaled
    return torch.where((wavelength >= high) & (wavelength <= low), between, scaled)
