"""Attention of whole sequences, written out, for tests of the decoder without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from checkpoint.hf import read_hf
from parallel.model_config import ModelConfig
from resharding.layout import empty_tensors
from resharding.layouts import trtllm_layout
from trtllm_rollout.embedded.decoder import Attention, Decoder, TensorParallel
from trtllm_rollout.embedded.heads import Heads


def attention_of(heads: tuple[Heads, ...], lengths: list[int]) -> Attention:
    """Attention over sequences of `lengths` packed one after the other, in double precision, sequence by sequence."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        h, tokens = heads[layer], sum(lengths)
        assert q.shape == (tokens, h.queries, h.key_dim) and k.shape == (tokens, h.kv, h.key_dim) and (v is None) == h.latent
        values = k[..., :h.value_dim] if v is None else v
        return torch.cat([_attended(h, *parts) for parts in zip(q.split(lengths), k.split(lengths), values.split(lengths), strict=True)])

    return attend


def _attended(h: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.double().repeat_interleave(h.queries // h.kv, 1) for x in (k, v))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (distance >= 0) & (distance < (h.window or len(q)))
    weights = (torch.einsum("qhd,khd->hqk", q.double(), k) * h.scale).masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if h.sinks is not None:
        total = total + h.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v).to(q.dtype)


def make_decoder(directory: str | Path, dtype: torch.dtype = torch.float32, tp: int = 1, rank: int = 0, moe_ep: int = 1, group: Any = None,
                 tokens: int = 256) -> Decoder:
    """A decoder with the directory's weights."""
    model = ModelConfig.from_directory(directory)
    layout = trtllm_layout(model, tp, rank, rank, dtype, moe_ep=moe_ep)
    tensors = empty_tensors(layout)
    read_hf(directory, layout, tensors, model)
    return Decoder(model, tensors, TensorParallel(group, tp, rank, moe_ep), tokens)


@torch.inference_mode()
def logits_of(decoder: Decoder, sequences: list[list[int]]) -> torch.Tensor | None:
    """Logits [tokens of all sequences, vocabulary] on the leader."""
    lengths = [len(s) for s in sequences]
    ids = torch.tensor([i for s in sequences for i in s])
    positions = torch.cat([torch.arange(n) for n in lengths])
    return decoder.logits(decoder.hidden(ids, positions, attention_of(decoder.heads, lengths)))
