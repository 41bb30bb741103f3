"""Models and weights that are made up: what a benchmark moves when no model is at hand."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch

from parallel.model_config import ModelConfig
from resharding.boxes import slices, volume
from resharding.layout import Layout, empty_tensors

# a llama of 550 million parameters: 1.1 GB in bfloat16
MADE_UP = dict(model_type="llama", hidden_size=1536, intermediate_size=4096, num_hidden_layers=18, num_attention_heads=24,
               num_key_value_heads=8, vocab_size=32000, max_position_embeddings=2048, rope_theta=10000.0, rms_norm_eps=1e-5)
MADE_UP_8B = {**MADE_UP, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128256,
              "rope_theta": 500000.0}  # the sizes of Llama 3.1 8B: 16 GB in bfloat16
NAMES = {"made-up-05b": MADE_UP, "made-up-8b": MADE_UP_8B}
RANDOM = 1 << 20  # values that are drawn; weights repeat them from a start of their own


def model_named(name: str | None) -> ModelConfig:
    """From a directory or a config.json; None: the made-up llama."""
    if name is None:
        return ModelConfig.from_hf(MADE_UP)
    path = Path(name)
    return ModelConfig.from_hf(json.loads(path.read_text())) if path.is_file() else ModelConfig.from_directory(path)


def named_shapes(name: str) -> ModelConfig | None:
    """A made-up llama in bfloat16; None for a name that is none of NAMES."""
    return ModelConfig.from_hf({**NAMES[name], "torch_dtype": "bfloat16"}) if name in NAMES else None


def padding_bytes(layout: Layout) -> int:
    """Bytes of the rows past the end of the vocabulary: they are part of an engine's tensors and of no canonical tensor, and are zeroed."""
    return sum(volume(p.region) * t.dtype.itemsize for t in layout.tensors for p in t.pieces if p.canonical is None)


def random_tensors(layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights at little cost: each canonical region repeats one draw of random values from a start of its own, the same on all ranks."""
    drawn = torch.randn(RANDOM, generator=torch.Generator().manual_seed(0)).to(device)
    tensors = empty_tensors(layout, device)
    for local in layout.tensors:
        tensor = tensors[local.name]
        for piece in local.pieces:
            count, begin = volume(piece.region), zlib.crc32(f"{piece.canonical} {piece.region}".encode()) % RANDOM
            values = drawn.roll(-begin).to(tensor.dtype).repeat(-(-count // RANDOM))[:count]
            piece.view.of(tensor)[slices(piece.place)] = values.view(piece.view.of(tensor)[slices(piece.place)].shape)
    return tensors
