"""Rotary inverse frequencies, with llama3 and YaRN scaling, and the scale that comes with YaRN."""

from __future__ import annotations

import math
from typing import Any

import torch

from parallel.model_config import ModelConfig, RopeScaling, Yarn


def rotary_size(model: ModelConfig) -> int:
    """Columns of a head that are rotated."""
    return model.mla.qk_rope_head_dim if model.mla else int(model.head_dim * model.rotary_fraction)


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Inverse frequencies [rotary_size / 2] in fp32."""
    d = rotary_size(model)
    inv_freq = 1.0 / (model.rope_theta ** (torch.arange(0, d, 2, dtype=torch.int64).to(torch.float32) / d))
    if isinstance(model.rope_scaling, RopeScaling):
        return _llama3(inv_freq, model.rope_scaling)
    return inv_freq if model.rope_scaling is None else _yarn(inv_freq, model.rope_scaling, d, model.rope_theta)


def _llama3(inv_freq: torch.Tensor, s: RopeScaling) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated.

    Source: transformers `modeling_rope_utils._compute_llama3_parameters`.
    """
    low = s.original_max_position_embeddings / s.low_freq_factor
    high = s.original_max_position_embeddings / s.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > low, inv_freq / s.factor, inv_freq)
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    between = (1 - smooth) * scaled / s.factor + smooth * scaled
    return torch.where((wavelength >= high) & (wavelength <= low), between, scaled)


def _yarn(inv_freq: torch.Tensor, s: Yarn, d: int, base: float) -> torch.Tensor:
    """Frequencies that turn more than `beta_fast` times in the original length are kept, those below `beta_slow` divided by `factor`.

    Source: arXiv 2309.00071, transformers `modeling_rope_utils._compute_yarn_parameters`.
    """
    low, high = (d * math.log(s.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))
                 for turns in (s.beta_fast, s.beta_slow))
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = ((torch.arange(d // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    return inv_freq / s.factor * ramp + inv_freq * (1 - ramp)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_scale(model: ModelConfig) -> float:
    """What cosines and sines are multiplied by: 1 without YaRN (transformers calls it attention_factor)."""
    s = model.rope_scaling
    if not isinstance(s, Yarn):
        return 1.0
    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return _mscale(s.factor, s.mscale) / _mscale(s.factor, s.mscale_all_dim)
    return _mscale(s.factor, 1.0)


def softmax_scale(model: ModelConfig) -> float:
    """What attention scores are multiplied by. YaRN of latent attention puts its scale for all dimensions here, once for the query and
    once for the key (transformers `modeling_deepseek_v3.yarn_apply_mscale`)."""
    s, scale = model.rope_scaling, float(model.head_dim) ** -0.5
    return scale * _mscale(s.factor, s.mscale_all_dim) ** 2 if model.mla and isinstance(s, Yarn) and s.mscale_all_dim else scale


def set_frequencies(module: Any, model: ModelConfig) -> None:
    """Give a GPTModel the frequencies of the model: Megatron's own llama3 scaling fixes all but the factor, its YaRN always truncates."""
    from parallel.megatron_modules import LatentRotary, Rotary

    frequencies = inverse_frequencies(model)
    if model.mla is None:
        module.rotary_pos_emb = Rotary(frequencies.to(module.rotary_pos_emb.inv_freq.device), module.rotary_pos_emb.cp_group)
        return
    for layer in module.decoder.layers:
        attention = layer.self_attention
        attention.rotary_pos_emb = LatentRotary(frequencies, rotary_scale(model), attention.pg_collection.cp)
