"""Engines over small models, and what transformers says about the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from checkpoint.hf import read_hf
from parallel.model_config import ModelConfig
from resharding.checksum import verify
from resharding.layouts import hf_layout
from resharding.piece_sums import piece_checksums
from tests.models import reference_logits
from trtllm_rollout.embedded.engine import EmbeddedEngine
from trtllm_rollout.protocol import Completion, Request, SamplingParams


def make_engine(directory: str | Path, version: int | None = 1, dtype: torch.dtype = torch.float32, tp: int = 1,
                **options: Any) -> EmbeddedEngine:
    """An engine with the directory's weights, committed as `version` (None: not committed). `tp` > 1 takes the whole world."""
    model = ModelConfig.from_directory(directory)
    rank = dist.get_rank() if tp > 1 else 0
    engine = EmbeddedEngine(model, dtype, dist.group.WORLD if tp > 1 else None, tp, rank, rank, **options)
    read_hf(directory, engine.layouts[rank], engine.weights(), model)
    if version is not None:
        engine.commit(version, checksums(directory, dtype))
    return engine


def checksums(directory: str | Path, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Checksum of every canonical tensor, straight from the files."""
    from safetensors.torch import load_file

    layout = hf_layout(ModelConfig.from_directory(directory), dtype)
    tensors = {k: v.to(layout[k].dtype) for k, v in load_file(Path(directory) / "model.safetensors").items()}
    return verify([layout], [piece_checksums(layout, tensors)])


def prompts(count: int, vocab: int = 200, seed: int = 0, longest: int = 20) -> list[tuple[int, ...]]:
    """Random prompts of 1 to `longest` ids."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(3, vocab, rng.integers(1, longest + 1)).tolist()) for _ in range(count)]


def requests(texts: list[tuple[int, ...]], samples: int = 1, first_id: int = 0, **sampling: Any) -> list[Request]:
    return [Request(first_id + i, ids, SamplingParams(**sampling), samples, (7, 3, first_id + i)) for i, ids in enumerate(texts)]


def tokens(completions: list[Completion]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(c.request_id, c.sample): c.token_ids for c in completions}


def greedy_reference(directory: str | Path, texts: list[tuple[int, ...]], max_tokens: int, stop: int | None) -> list[tuple[int, ...]]:
    """transformers `generate` in fp32, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    out = []
    for ids in texts:
        with torch.no_grad():
            whole = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                                   max_new_tokens=max_tokens, eos_token_id=stop if stop is not None else -1, pad_token_id=0)
        out.append(tuple(whole[0, len(ids):].tolist()))
    return out


def recomputed_log_probs(directory: str | Path, prompt: tuple[int, ...], answer: tuple[int, ...], temperature: float) -> torch.Tensor:
    """Log-probs [answer] of transformers under the full softmax at `temperature`."""
    logits = reference_logits(directory, [list(prompt + answer)])[0]
    scaled = torch.log_softmax(logits[len(prompt) - 1:-1].double() / temperature, -1)
    return scaled.gather(1, torch.tensor(answer)[:, None])[:, 0]
