"""What a family file declares: its parameters, each with its place in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from parallel.model_config import ModelConfig

Kind = Literal["vocabulary", "replicated", "column", "row", "qkv", "gate_up"]
Stage = Literal["embedding", "layer", "final", "head"]


@dataclass(frozen=True)
class Parameter:
    """One fused parameter and the canonical tensors it is made of.

    `kind` says how it is cut over tensor-parallel ranks and how its ingredients are fused:

    - vocabulary: rows, padded to a multiple (Megatron: divisor x tp, engine: tp)
    - replicated: the same on every rank
    - column: rows (dim 0) / row: columns (dim 1)
    - qkv: three ingredients. Megatron interleaves by query group (its query heads, its key head, its value head);
      the engine concatenates its own q, k and v rows and repeats key/value heads where tp exceeds them
    - gate_up: two ingredients; every rank holds its gate rows above its up rows

    `hf` maps canonical name templates (with `{layer}`) to full shapes. `mcore` is the name below a GPTModel built from
    the local spec, `mcore_te` from the Transformer Engine spec where that differs, `trtllm` the name in the PyTorch backend.
    """

    kind: Kind
    stage: Stage
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    mcore: str
    trtllm: str
    mcore_te: str | None = None


@dataclass(frozen=True)
class Family:
    """A model architecture. `name` is the HF `model_type`."""

    name: str
    architecture: str
    read: Callable[[dict[str, Any]], dict[str, Any]]
    parameters: Callable[[ModelConfig], tuple[Parameter, ...]]


def decoder_parameters(c: ModelConfig) -> tuple[Parameter, ...]:
    """The pre-norm decoder that `llama` and its relatives share: RMSNorm, grouped-query attention, SwiGLU."""
    h, f, v = c.hidden_size, c.intermediate_size, c.vocab_size
    hf, mc = "model.layers.{layer}.", "decoder.layers.{layer}."
    qkv = tuple((f"{hf}self_attn.{x}_proj", rows) for x, rows in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size)))
    out = [
        Parameter("vocabulary", "embedding", (("model.embed_tokens.weight", (v, h)),),
                  "embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        Parameter("replicated", "layer", ((hf + "input_layernorm.weight", (h,)),), mc + "input_layernorm.weight",
                  hf + "input_layernorm.weight", mc + "self_attention.linear_qkv.layer_norm_weight"),
        Parameter("qkv", "layer", tuple((n + ".weight", (rows, h)) for n, rows in qkv),
                  mc + "self_attention.linear_qkv.weight", hf + "self_attn.qkv_proj.weight"),
        Parameter("row", "layer", ((hf + "self_attn.o_proj.weight", (h, c.q_size)),),
                  mc + "self_attention.linear_proj.weight", hf + "self_attn.o_proj.weight"),
        Parameter("replicated", "layer", ((hf + "post_attention_layernorm.weight", (h,)),), mc + "pre_mlp_layernorm.weight",
                  hf + "post_attention_layernorm.weight", mc + "mlp.linear_fc1.layer_norm_weight"),
        Parameter("gate_up", "layer", ((hf + "mlp.gate_proj.weight", (f, h)), (hf + "mlp.up_proj.weight", (f, h))),
                  mc + "mlp.linear_fc1.weight", hf + "mlp.gate_up_proj.weight"),
        Parameter("row", "layer", ((hf + "mlp.down_proj.weight", (h, f)),),
                  mc + "mlp.linear_fc2.weight", hf + "mlp.down_proj.weight"),
        Parameter("replicated", "final", (("model.norm.weight", (h,)),), "decoder.final_layernorm.weight", "model.norm.weight"),
    ]
    if c.qkv_bias:
        out.insert(3, Parameter("qkv", "layer", tuple((n + ".bias", (rows,)) for n, rows in qkv),
                                mc + "self_attention.linear_qkv.bias", hf + "self_attn.qkv_proj.bias"))
    if not c.tied:
        out.append(Parameter("vocabulary", "head", (("lm_head.weight", (v, h)),), "output_layer.weight", "lm_head.weight"))
    return tuple(out)
