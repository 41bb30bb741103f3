"""Small random Hugging Face models for tests, written as directories, and the reference logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=203, max_position_embeddings=256, rms_norm_eps=1e-5, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)


def write_model(directory: str | Path, family: str = "llama", seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """Write a random model of `family` ("llama" or "qwen2") to `directory` and return it. `changes` override TINY."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[family]
    config = config_class(**{**TINY, **changes})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config)
    for name, parameter in model.named_parameters():  # biases and norms must not be trivial
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    torch.random.set_rng_state(state)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return Path(directory)


def reference_logits(directory: str | Path, ids: list[list[int]]) -> Any:
    """Logits of transformers in fp32, [sequences, tokens, vocab]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(ids)).logits
