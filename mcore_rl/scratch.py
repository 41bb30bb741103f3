"""A small model from scratch: random weights and a character tokenizer, as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from checkpoint.hf import write_hf
from mcore_rl.config import InitConfig
from mcore_rl.tokens import character_tokenizer
from parallel.families import FAMILIES
from parallel.model_config import ModelConfig
from resharding.layout import canonical_shapes


def hf_config(init: InitConfig, vocab_size: int, bos: int, eos: int) -> dict[str, Any]:
    """The config.json of such a model."""
    experts = {} if init.family != "qwen3_moe" else {
        "num_experts": init.num_experts, "num_experts_per_tok": init.experts_per_token, "moe_intermediate_size": init.moe_intermediate_size,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {
        "architectures": [FAMILIES[init.family].architecture], "model_type": init.family, "hidden_size": init.hidden_size,
        "intermediate_size": init.intermediate_size, "num_hidden_layers": init.num_layers, "num_attention_heads": init.num_heads,
        "num_key_value_heads": init.num_kv_heads, "head_dim": init.head_dim or init.hidden_size // init.num_heads,
        "vocab_size": vocab_size, "max_position_embeddings": init.max_position_embeddings, "rms_norm_eps": 1e-5,
        "rope_theta": init.rope_theta, "tie_word_embeddings": init.tied, "initializer_range": init.init_std, "hidden_act": "silu",
        "dtype": "float32", "bos_token_id": bos, "eos_token_id": eos, **experts,
    }


def make_from_scratch(init: InitConfig, directory: str | Path, seed: int) -> None:
    """Write the model and its tokenizer to `directory`. Norms start at 1, biases at 0, the rest normal with init.init_std."""
    tokenizer = character_tokenizer(init.characters)
    model = ModelConfig.from_hf(hf_config(init, len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in canonical_shapes(model).items():
        if name.endswith("bias"):
            tensors[name] = torch.zeros(shape)
        elif "norm" in name:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * init.init_std
    write_hf(directory, tensors, model)
    tokenizer.save_pretrained(directory)
