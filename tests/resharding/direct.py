"""Shards built directly from full tensors with plain slicing, as an independent reference for layouts and plans."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.model_config import ModelConfig

Tensors = dict[str, Tensor]


def tiny(family: str = "llama", **changes: object) -> ModelConfig:
    sizes = dict(hidden_size=8, intermediate_size=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=13,
                 max_position_embeddings=32, make_vocab_size_divisible_by=2, qkv_bias=family == "qwen2")
    return ModelConfig(family=family, **{**sizes, **changes})  # type: ignore[arg-type]


def canonical_tensors(c: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Random full tensors under HF names, written out here by hand (not read from the family)."""
    g = torch.Generator().manual_seed(seed)
    h, q, kv, f = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, h)}
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        shapes.update({p + "input_layernorm.weight": (h,), p + "self_attn.q_proj.weight": (q, h), p + "self_attn.k_proj.weight": (kv, h),
                       p + "self_attn.v_proj.weight": (kv, h), p + "self_attn.o_proj.weight": (h, q),
                       p + "post_attention_layernorm.weight": (h,), p + "mlp.gate_proj.weight": (f, h), p + "mlp.up_proj.weight": (f, h),
                       p + "mlp.down_proj.weight": (h, f)})
        if c.qkv_bias:
            shapes.update({p + "self_attn.q_proj.bias": (q,), p + "self_attn.k_proj.bias": (kv,), p + "self_attn.v_proj.bias": (kv,)})
    shapes["model.norm.weight"] = (h,)
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, h)
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def pad_rows(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def mcore_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Query groups side by side: [q heads of group 0, k 0, v 0, q heads of group 1, ...]."""
    return torch.cat([torch.cat(parts) for parts in zip(q.chunk(groups), k.chunk(groups), v.chunk(groups))])


def mcore_shard(full: Tensors, c: ModelConfig, par: ParallelConfig, rank: int, world: int) -> Tensors:
    tp, t = par.tp, rank % par.tp
    pp_rank = rank // (world // par.pp)
    chunks, per = par.vpp or 1, c.num_layers // (par.pp * (par.vpp or 1))
    vocabulary = math.ceil(c.vocab_size / (c.make_vocab_size_divisible_by * tp)) * c.make_vocab_size_divisible_by * tp
    out: Tensors = {}
    for chunk in range(chunks):
        prefix = f"chunk{chunk}." if chunks > 1 else ""
        first, last = (pp_rank, chunk) == (0, 0), (pp_rank, chunk) == (par.pp - 1, chunks - 1)
        embed = full["model.embed_tokens.weight"]
        if first:
            out[prefix + "embedding.word_embeddings.weight"] = pad_rows(embed, vocabulary).chunk(tp)[t]
        for local in range(per):
            s, d = f"model.layers.{(chunk * par.pp + pp_rank) * per + local}.", f"{prefix}decoder.layers.{local}."
            out[d + "input_layernorm.weight"] = full[s + "input_layernorm.weight"]
            out[d + "pre_mlp_layernorm.weight"] = full[s + "post_attention_layernorm.weight"]
            for kind in ("weight", "bias") if c.qkv_bias else ("weight",):
                q, k, v = (full[f"{s}self_attn.{x}_proj.{kind}"] for x in "qkv")
                fused = mcore_qkv(q, k, v, c.num_kv_heads)
                out[f"{d}self_attention.linear_qkv.{kind}"] = fused[t * (len(fused) // tp):(t + 1) * (len(fused) // tp)]
            out[d + "self_attention.linear_proj.weight"] = full[s + "self_attn.o_proj.weight"].chunk(tp, 1)[t]
            out[d + "mlp.linear_fc1.weight"] = torch.cat([full[f"{s}mlp.{x}_proj.weight"].chunk(tp)[t] for x in ("gate", "up")])
            out[d + "mlp.linear_fc2.weight"] = full[s + "mlp.down_proj.weight"].chunk(tp, 1)[t]
        if last:
            out[prefix + "decoder.final_layernorm.weight"] = full["model.norm.weight"]
            if not c.tied or par.pp > 1:
                out[prefix + "output_layer.weight"] = pad_rows(embed if c.tied else full["lm_head.weight"], vocabulary).chunk(tp)[t]
    return out


def trtllm_shard(full: Tensors, c: ModelConfig, tp: int, t: int) -> Tensors:
    rows = math.ceil(c.vocab_size / tp)
    out = {"model.norm.weight": full["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in full:
            out[name] = pad_rows(full[name], rows * tp)[t * rows:(t + 1) * rows]

    def heads(x: Tensor, count: int) -> Tensor:
        """This rank's rows of a tensor of `count` heads, each repeated where tp exceeds them."""
        by_head = x.reshape(count, c.head_dim, *x.shape[1:])
        repeated = by_head.repeat_interleave(max(1, tp // count), dim=0)
        return repeated.chunk(tp)[t].flatten(0, 1)

    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[p + norm] = full[p + norm]
        for kind in ("weight", "bias") if c.qkv_bias else ("weight",):
            counts = (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads))
            out[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([heads(full[f"{p}self_attn.{x}_proj.{kind}"], n) for x, n in counts])
        out[p + "mlp.gate_up_proj.weight"] = torch.cat([full[f"{p}mlp.{x}_proj.weight"].chunk(tp)[t] for x in ("gate", "up")])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            out[p + name] = full[p + name].chunk(tp, 1)[t]
    return out


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), f"{name}\nfound\n{found[name]}\nexpected\n{tensor}"


def simulate(plan: object, sources: dict[int, Tensors], destinations: dict[int, Tensors]) -> None:
    """Execute a plan of several ranks in this process, by the meaning of its copies alone."""
    for c in plan.copies:  # type: ignore[attr-defined]
        part = c.src_view.of(sources[c.src_rank][c.src_tensor])[tuple(slice(*p) for p in c.src_box)]
        c.dst_view.of(destinations[c.dst_rank][c.dst_tensor])[tuple(slice(*p) for p in c.dst_box)] = part.to(c.dtype)
    for pad in plan.paddings:  # type: ignore[attr-defined]
        pad.view.of(destinations[pad.rank][pad.tensor])[tuple(slice(*p) for p in pad.box)] = 0
