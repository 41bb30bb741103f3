"""Shards built directly from full tensors with plain slicing: the independent reference for families, layouts and plans.

Nothing here reads the families or the layouts of the product: names, orders and cuts are written out again by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.model_config import MLA, ModelConfig, MoE

Tensors = dict[str, Tensor]

SIZES: dict[str, Any] = dict(hidden_size=8, intermediate_size=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=13,
                             max_position_embeddings=32, make_vocab_size_divisible_by=2)
MOE_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss")
ENGINE_FAMILIES = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral")
KEPT_IN_FLOAT32 = "e_score_correction_bias"


def tiny(family: str = "llama", moe_layers: Sequence[int] | None = None, **changes: Any) -> ModelConfig:
    """A small model of any family. `moe_layers`: which layers have experts (None: as the family usually has it)."""
    layers = changes.get("num_layers", SIZES["num_layers"])
    usual = range(1, layers) if family in ("deepseek_v2", "deepseek_v3", "glm4_moe") else range(layers)
    experts = tuple(usual if moe_layers is None else moe_layers)
    moe = dict(num_experts=4, top_k=2, intermediate_size=8, layers=experts)
    latent = dict(kv_lora_rank=6, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=3)
    own: dict[str, dict[str, Any]] = {
        "llama": {}, "mistral": {}, "qwen2": dict(qkv_bias=True), "qwen3": dict(qk_norm=True),
        "qwen2_moe": dict(qkv_bias=True, moe=MoE(**moe, shared_intermediate_size=12, shared_gate=True)),
        "qwen3_moe": dict(qk_norm=True, moe=MoE(**moe)), "mixtral": dict(moe=MoE(**moe)),
        "deepseek_v2": dict(moe=MoE(**moe, shared_intermediate_size=8), mla=MLA(None, **latent), num_kv_heads=4, head_dim=4),
        "deepseek_v3": dict(moe=MoE(**moe, shared_intermediate_size=8, score="sigmoid", correction_bias=True), mla=MLA(4, **latent),
                            num_kv_heads=4, head_dim=4),
        "glm4_moe": dict(qkv_bias=True, qk_norm=True, moe=MoE(**moe, shared_intermediate_size=8, correction_bias=True)),
        "gpt_oss": dict(qkv_bias=True, o_bias=True, sinks=True, moe=MoE(**moe, router_bias=True, expert_bias=True)),
    }
    return ModelConfig(family=family, **{**SIZES, **own[family], **changes})


def canonical_tensors(c: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Random full tensors under HF names."""
    g = torch.Generator().manual_seed(seed)
    h, f = c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, h)}
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (h,)
        shapes.update({p + "self_attn." + name: shape for name, shape in (_latent_shapes(c) if c.mla else _attention_shapes(c)).items()})
        if c.moe and i in c.moe.layers:
            shapes.update({p + name: shape for name, shape in _moe_shapes(c).items()})
        else:
            shapes.update({p + "mlp.gate_proj.weight": (f, h), p + "mlp.up_proj.weight": (f, h), p + "mlp.down_proj.weight": (h, f)})
    shapes["model.norm.weight"] = (h,)
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, h)
    return cast({name: torch.randn(shape, generator=g) for name, shape in shapes.items()}, dtype)


def _attention_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    h, d = c.hidden_size, c.head_dim
    q, kv = c.num_heads * d, c.num_kv_heads * d
    out: dict[str, tuple[int, ...]] = {"q_proj.weight": (q, h), "k_proj.weight": (kv, h), "v_proj.weight": (kv, h), "o_proj.weight": (h, q)}
    if c.qkv_bias:
        out.update({"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)})
    if c.o_bias:
        out["o_proj.bias"] = (h,)
    if c.qk_norm:
        out.update({"q_norm.weight": (d,), "k_norm.weight": (d,)})
    if c.sinks:
        out["sinks"] = (c.num_heads,)
    return out


def _latent_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    h, n, m = c.hidden_size, c.num_heads, c.mla
    q = n * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    out: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (m.kv_lora_rank + m.qk_rope_head_dim, h), "kv_a_layernorm.weight": (m.kv_lora_rank,),
        "kv_b_proj.weight": (n * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank), "o_proj.weight": (h, n * m.v_head_dim)}
    if m.q_lora_rank:
        out.update({"q_a_proj.weight": (m.q_lora_rank, h), "q_a_layernorm.weight": (m.q_lora_rank,), "q_b_proj.weight": (q, m.q_lora_rank)})
    else:
        out["q_proj.weight"] = (q, h)
    return out


def expert_words(c: ModelConfig) -> tuple[str, str, str, str, str]:
    """HF's words: the block, then gate, up, down of an expert, then the router."""
    if c.family == "mixtral":
        return "block_sparse_moe", "w1", "w3", "w2", "gate"
    return "mlp", "gate_proj", "up_proj", "down_proj", "router" if c.family == "gpt_oss" else "gate"


def shared_words(c: ModelConfig) -> str:
    return "mlp.shared_expert" if c.family == "qwen2_moe" else "mlp.shared_experts"


def _moe_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    block, gate, up, down, router = expert_words(c)
    h, f, s, n = c.hidden_size, c.moe.intermediate_size, c.moe.shared_intermediate_size, c.moe.num_experts
    out: dict[str, tuple[int, ...]] = {f"{block}.{router}.weight": (n, h)}
    if c.moe.router_bias:
        out[f"{block}.{router}.bias"] = (n,)
    if c.moe.correction_bias:
        out[f"{block}.{router}.{KEPT_IN_FLOAT32}"] = (n,)
    for e in range(n):
        x = f"{block}.experts.{e}."
        out.update({f"{x}{gate}.weight": (f, h), f"{x}{up}.weight": (f, h), f"{x}{down}.weight": (h, f)})
        if c.moe.expert_bias:
            out.update({f"{x}{gate}.bias": (f,), f"{x}{up}.bias": (f,), f"{x}{down}.bias": (h,)})
    if s:
        x = shared_words(c)
        out.update({x + ".gate_proj.weight": (s, h), x + ".up_proj.weight": (s, h), x + ".down_proj.weight": (h, s)})
    if c.moe.shared_gate:
        out[shared_words(c) + "_gate.weight"] = (1, h)
    return out


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """In `dtype`, the router's correction bias aside."""
    return {n: t if KEPT_IN_FLOAT32 in n or n.endswith("router.expert_bias") else t.to(dtype) for n, t in tensors.items()}


def hf_files(full: Tensors, c: ModelConfig, experts: str) -> Tensors:
    """The tensors of a HF directory: `experts` "split", "fused" (transformers 5) or "transposed" (gpt_oss)."""
    if experts == "split" or not c.moe:
        return dict(full)
    block, *words, _ = expert_words(c)
    out = {name: t for name, t in full.items() if f".{block}.experts." not in name}
    for i in c.moe.layers:
        for kind, tail in (("weight", ""), ("bias", "_bias")):
            if kind == "bias" and not c.moe.expert_bias:
                continue
            x = f"model.layers.{i}.{block}.experts."
            gate, up, down = (torch.stack([full[f"{x}{e}.{w}.{kind}"] for e in range(c.moe.num_experts)]) for w in words)
            both = torch.cat([gate, up], 1)
            if experts == "transposed":  # columns gate 0, up 0, gate 1, up 1, ...
                both = torch.stack([gate, up], 2).flatten(1, 2)
                both, down = (both.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()) if kind == "weight" else (both, down)
            out[f"model.layers.{i}.mlp.experts.gate_up_proj{tail}"] = both
            out[f"model.layers.{i}.mlp.experts.down_proj{tail}"] = down
    return out


def pad_rows(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def mcore_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Query groups side by side: [q heads of group 0, k 0, v 0, q heads of group 1, ...]."""
    return torch.cat([torch.cat(parts) for parts in zip(q.chunk(groups), k.chunk(groups), v.chunk(groups))])


def part(x: Tensor, size: int, rank: int, dim: int = 0) -> Tensor:
    n = x.shape[dim] // size
    assert n * size == x.shape[dim]
    return x.narrow(dim, rank * n, n)


def mcore_shard(full: Tensors, c: ModelConfig, par: ParallelConfig, rank: int, world: int, names: str = "local",
                counts: Sequence[int] | None = None, head: bool = True) -> Tensors:
    """What one Megatron rank holds. `counts`: decoder layers of every stage (times chunk) in the model's order; None: all the same."""
    tp, t = par.tp, rank % par.tp
    in_stage = rank % (world // par.pp)
    pp_rank = rank // (world // par.pp)
    chunks = par.vpp or 1
    counts = counts or [c.num_layers // (par.pp * chunks)] * (par.pp * chunks)
    etp = par.etp or tp
    vocabulary = math.ceil(c.vocab_size / (c.make_vocab_size_divisible_by * tp)) * c.make_vocab_size_divisible_by * tp
    embed = full["model.embed_tokens.weight"]
    out: Tensors = {}
    for chunk in range(chunks):
        prefix = f"chunk{chunk}." if chunks > 1 else ""
        first, last = (pp_rank, chunk) == (0, 0), (pp_rank, chunk) == (par.pp - 1, chunks - 1)
        if first:
            out[prefix + "embedding.word_embeddings.weight"] = part(pad_rows(embed, vocabulary), tp, t)
        stage = chunk * par.pp + pp_rank
        for local in range(counts[stage]):
            i = sum(counts[:stage]) + local
            s, d = f"model.layers.{i}.", f"{prefix}decoder.layers.{local}."
            layer = {**(_mcore_latent if c.mla else _mcore_attention)(full, c, s, tp, t, names)}
            if c.moe and i in c.moe.layers:
                layer.update(_mcore_moe(full, c, s, tp, t, etp, in_stage % etp, par.ep, in_stage // etp % par.ep, names))
                layer["pre_mlp_layernorm.weight"] = full[s + "post_attention_layernorm.weight"]
            else:
                layer.update(_mcore_mlp(full, s + "mlp", "mlp", tp, t))
                norm = "mlp.linear_fc1.layer_norm_weight" if names == "te" else "pre_mlp_layernorm.weight"
                layer[norm] = full[s + "post_attention_layernorm.weight"]
            out.update({d + name: tensor for name, tensor in layer.items()})
        if last:
            out[prefix + "decoder.final_layernorm.weight"] = full["model.norm.weight"]
            if head and (not c.tied or par.pp > 1):
                out[prefix + "output_layer.weight"] = part(pad_rows(embed if c.tied else full["lm_head.weight"], vocabulary), tp, t)
    return out


def _mcore_attention(full: Tensors, c: ModelConfig, s: str, tp: int, t: int, names: str) -> Tensors:
    a = s + "self_attn."
    out = {"self_attention.linear_qkv.layer_norm_weight" if names == "te" else "input_layernorm.weight": full[s + "input_layernorm.weight"],
           "self_attention.linear_proj.weight": part(full[a + "o_proj.weight"], tp, t, 1)}
    for kind in ("weight", "bias") if c.qkv_bias else ("weight",):
        q, k, v = (full[f"{a}{x}_proj.{kind}"] for x in "qkv")
        out[f"self_attention.linear_qkv.{kind}"] = part(mcore_qkv(q, k, v, c.num_kv_heads), tp, t)
    if c.o_bias:
        out["self_attention.linear_proj.bias"] = full[a + "o_proj.bias"]
    if c.qk_norm:
        out.update({f"self_attention.{x}_layernorm.weight": full[f"{a}{x}_norm.weight"] for x in "qk"})
    if c.sinks:
        out["self_attention.core_attention.softmax_offset"] = part(full[a + "sinks"], tp, t)
    return out


def _mcore_latent(full: Tensors, c: ModelConfig, s: str, tp: int, t: int, names: str) -> Tensors:
    """The local spec cuts the down-projections over tp; Transformer Engine's has them whole and the norms in the up-projections."""
    a, te = s + "self_attn.", names == "te"
    down = full[a + "kv_a_proj_with_mqa.weight"]
    out = {"input_layernorm.weight": full[s + "input_layernorm.weight"],
           "self_attention.linear_kv_down_proj.weight": down if te else part(down, tp, t),
           "self_attention.linear_kv_up_proj.layer_norm_weight" if te else "self_attention.kv_layernorm.weight": full[a + "kv_a_layernorm.weight"],
           "self_attention.linear_kv_up_proj.weight": part(full[a + "kv_b_proj.weight"], tp, t),
           "self_attention.linear_proj.weight": part(full[a + "o_proj.weight"], tp, t, 1)}
    if c.mla.q_lora_rank is None:
        return {**out, "self_attention.linear_q_proj.weight": part(full[a + "q_proj.weight"], tp, t)}
    down = full[a + "q_a_proj.weight"]
    return {**out, "self_attention.linear_q_down_proj.weight": down if te else part(down, tp, t),
            "self_attention.linear_q_up_proj.layer_norm_weight" if te else "self_attention.q_layernorm.weight": full[a + "q_a_layernorm.weight"],
            "self_attention.linear_q_up_proj.weight": part(full[a + "q_b_proj.weight"], tp, t)}


def _mcore_mlp(full: Tensors, source: str, target: str, tp: int, t: int) -> Tensors:
    return {target + ".linear_fc1.weight": torch.cat([part(full[f"{source}.{x}_proj.weight"], tp, t) for x in ("gate", "up")]),
            target + ".linear_fc2.weight": part(full[source + ".down_proj.weight"], tp, t, 1)}


def _mcore_moe(full: Tensors, c: ModelConfig, s: str, tp: int, t: int, etp: int, et: int, ep: int, e_rank: int, names: str) -> Tensors:
    block, gate, up, down, router = expert_words(c)
    out = {"mlp.router.weight": full[f"{s}{block}.{router}.weight"]}
    if c.moe.router_bias:
        out["mlp.router.bias"] = full[f"{s}{block}.{router}.bias"]
    if c.moe.correction_bias:
        out["mlp.router.expert_bias"] = full[f"{s}{block}.{router}.{KEPT_IN_FLOAT32}"]
    per_rank = c.moe.num_experts // ep
    for local in range(per_rank):
        x = f"{s}{block}.experts.{e_rank * per_rank + local}."
        for kind in ("weight", "bias") if c.moe.expert_bias else ("weight",):
            fc1, fc2 = ((f"mlp.experts.linear_fc{n}.{kind}{local}" if names == "te" else f"mlp.experts.local_experts.{local}.linear_fc{n}.{kind}")
                        for n in (1, 2))
            out[fc1] = torch.cat([part(full[f"{x}{w}.{kind}"], etp, et) for w in (gate, up)])
            out[fc2] = part(full[f"{x}{down}.weight"], etp, et, 1) if kind == "weight" else full[f"{x}{down}.bias"]
    if c.moe.shared_intermediate_size:
        out.update(_mcore_mlp(full, s + shared_words(c), "mlp.shared_experts", tp, t))
    if c.moe.shared_gate:
        out["mlp.shared_experts.gate_weight"] = full[f"{s}{shared_words(c)}_gate.weight"]
    return out


def rank_heads(x: Tensor, count: int, head_dim: int, tp: int, t: int) -> Tensor:
    """This rank's rows of a tensor of `count` heads, each repeated where tp exceeds them."""
    by_head = x.reshape(count, head_dim, *x.shape[1:])
    return part(by_head.repeat_interleave(max(1, tp // count), dim=0), tp, t).flatten(0, 1)


def rank_qkv(full: Tensors, c: ModelConfig, a: str, kind: str, tp: int, t: int) -> Tensor:
    counts = (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads))
    return torch.cat([rank_heads(full[f"{a}{x}_proj.{kind}"], n, c.head_dim, tp, t) for x, n in counts])


def rank_experts(full: Tensors, c: ModelConfig, s: str, kind: str, moe_tp: int, moe_ep: int, t: int) -> tuple[Tensor, Tensor]:
    """[experts, up above gate, ...] and [experts, ...] of the down projection: contiguous experts by t % moe_ep, cut by t // moe_ep."""
    block, gate, up, down, _ = expert_words(c)
    per_rank = c.moe.num_experts // moe_ep
    own = [f"{s}{block}.experts.{t % moe_ep * per_rank + e}." for e in range(per_rank)]
    both = torch.stack([torch.cat([part(full[f"{x}{w}.{kind}"], moe_tp, t // moe_ep) for w in (up, gate)]) for x in own])
    downs = [full[f"{x}{down}.{kind}"] for x in own]
    return both, torch.stack([part(x, moe_tp, t // moe_ep, 1) for x in downs] if kind == "weight" else downs)


def trtllm_shard(full: Tensors, c: ModelConfig, tp: int, t: int, moe_ep: int = 1, tied_head: bool = False) -> Tensors:
    """What rank t of TensorRT-LLM's PyTorch backend holds."""
    rows = math.ceil(c.vocab_size / tp)
    out = {"model.norm.weight": full["model.norm.weight"]}
    if c.tied and tied_head:
        full = {**full, "lm_head.weight": full["model.embed_tokens.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in full:
            out[name] = pad_rows(full[name], rows * tp)[t * rows:(t + 1) * rows]
    for i in range(c.num_layers):
        s = f"model.layers.{i}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[s + norm] = full[s + norm]
        out.update((_trtllm_latent if c.mla else _trtllm_attention)(full, c, s + "self_attn.", tp, t))
        if c.moe and i in c.moe.layers:
            out.update(_trtllm_moe(full, c, s, tp, t, moe_ep))
        else:
            out.update(_trtllm_mlp(full, s + "mlp", tp, t))
    return out


def _trtllm_attention(full: Tensors, c: ModelConfig, a: str, tp: int, t: int) -> Tensors:
    out = {f"{a}qkv_proj.{kind}": rank_qkv(full, c, a, kind, tp, t) for kind in (("weight", "bias") if c.qkv_bias else ("weight",))}
    out[a + "o_proj.weight"] = part(full[a + "o_proj.weight"], tp, t, 1)
    if c.o_bias:
        out[a + "o_proj.bias"] = full[a + "o_proj.bias"]
    if c.qk_norm:
        out.update({f"{a}{x}_norm.weight": full[f"{a}{x}_norm.weight"] for x in "qk"})
    if c.sinks:
        out[a + "sinks"] = part(full[a + "sinks"], tp, t)
    return out


def _trtllm_latent(full: Tensors, c: ModelConfig, a: str, tp: int, t: int) -> Tensors:
    down = full[a + "kv_a_proj_with_mqa.weight"]
    out = {a + "kv_a_layernorm.weight": full[a + "kv_a_layernorm.weight"], a + "kv_b_proj.weight": part(full[a + "kv_b_proj.weight"], tp, t),
           a + "o_proj.weight": part(full[a + "o_proj.weight"], tp, t, 1)}
    if c.mla.q_lora_rank is None:
        return {**out, a + "kv_a_proj_with_mqa.weight": down, a + "q_proj.weight": part(full[a + "q_proj.weight"], tp, t)}
    return {**out, a + "kv_a_proj_with_mqa.weight": torch.cat([full[a + "q_a_proj.weight"], down]),
            a + "q_a_layernorm.weight": full[a + "q_a_layernorm.weight"], a + "q_b_proj.weight": part(full[a + "q_b_proj.weight"], tp, t)}


def _trtllm_mlp(full: Tensors, name: str, tp: int, t: int) -> Tensors:
    return {name + ".gate_up_proj.weight": torch.cat([part(full[f"{name}.{x}_proj.weight"], tp, t) for x in ("gate", "up")]),
            name + ".down_proj.weight": part(full[name + ".down_proj.weight"], tp, t, 1)}


def _trtllm_moe(full: Tensors, c: ModelConfig, s: str, tp: int, t: int, moe_ep: int) -> Tensors:
    block, _, _, _, router = expert_words(c)
    out = {name: full[name] for end in ("weight", "bias", KEPT_IN_FLOAT32) if (name := f"{s}{block}.{router}.{end}") in full}
    for kind in ("weight", "bias") if c.moe.expert_bias else ("weight",):
        both, down = rank_experts(full, c, s, kind, tp // moe_ep, moe_ep, t)
        out.update({f"{s}{block}.experts.w3_w1_{kind}": both, f"{s}{block}.experts.w2_{kind}": down})
    if c.moe.shared_intermediate_size:
        out.update(_trtllm_mlp(full, s + shared_words(c), tp, t))
    if c.moe.shared_gate:
        out[f"{s}{shared_words(c)}_gate.weight"] = full[f"{s}{shared_words(c)}_gate.weight"]
    return out


def engine_shard(full: Tensors, c: ModelConfig, tp: int, pp: int, rank: int, dtype: torch.dtype = torch.float32, moe_tp: int | None = None,
                 moe_ep: int = 1, parallel_embedding: bool = False) -> Tensors:
    """rank{rank}.safetensors of a classic TensorRT-LLM checkpoint."""
    pp_rank, t = divmod(rank, tp)
    moe_tp = moe_tp or tp // moe_ep
    per = c.num_layers // pp
    rows = math.ceil(c.vocab_size / tp)
    embed = full["model.embed_tokens.weight"]
    out: Tensors = {}
    if pp_rank == 0:
        out["transformer.vocab_embedding.weight"] = pad_rows(embed, rows * tp)[t * rows:(t + 1) * rows] if parallel_embedding else embed
    for local in range(per):
        s, d = f"model.layers.{pp_rank * per + local}.", f"transformer.layers.{local}."
        a = s + "self_attn."
        layer = {"input_layernorm.weight": full[s + "input_layernorm.weight"], "post_layernorm.weight": full[s + "post_attention_layernorm.weight"],
                 "attention.qkv.weight": rank_qkv(full, c, a, "weight", tp, t), "attention.dense.weight": part(full[a + "o_proj.weight"], tp, t, 1)}
        if c.qkv_bias:
            layer["attention.qkv.bias"] = rank_qkv(full, c, a, "bias", tp, t)
        if c.qk_norm:
            layer.update({f"attention.{x}_layernorm.weight": full[f"{a}{x}_norm.weight"] for x in "qk"})
        if c.moe:
            layer["mlp.fc.weight"], layer["mlp.proj.weight"] = rank_experts(full, c, s, "weight", moe_tp, moe_ep, t)
            layer["mlp.router.weight"] = full[f"{s}{expert_words(c)[0]}.gate.weight"]
            if c.moe.shared_intermediate_size:
                x = s + "mlp.shared_expert"
                layer["mlp.shared_expert.fc.weight"] = torch.cat([part(full[f"{x}.{w}_proj.weight"], tp, t) for w in ("up", "gate")])
                layer["mlp.shared_expert.proj.weight"] = part(full[x + ".down_proj.weight"], tp, t, 1)
                layer["mlp.shared_expert_gate.weight"] = full[x + "_gate.weight"]
        else:
            for theirs, ours in (("fc", "gate"), ("gate", "up")):
                layer[f"mlp.{theirs}.weight"] = part(full[f"{s}mlp.{ours}_proj.weight"], tp, t)
            layer["mlp.proj.weight"] = part(full[s + "mlp.down_proj.weight"], tp, t, 1)
        out.update({d + name: tensor for name, tensor in layer.items()})
    if pp_rank == pp - 1:
        out["transformer.ln_f.weight"] = full["model.norm.weight"]
        out["lm_head.weight"] = pad_rows(embed if c.tied else full["lm_head.weight"], rows * tp)[t * rows:(t + 1) * rows]
    return {name: t.float() if name.endswith("router.weight") else t.to(dtype) for name, t in out.items()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, \
            f"{name}: found {tuple(found[name].shape)} {found[name].dtype}, expected {tuple(tensor.shape)} {tensor.dtype}"
        assert torch.equal(found[name], tensor), f"{name}\nfound\n{found[name]}\nexpected\n{tensor}"


def simulate(plan: object, sources: dict[int, Tensors], destinations: dict[int, Tensors]) -> None:
    """Execute a plan of several ranks in this process, by the meaning of its copies alone."""
    for c in plan.copies:  # type: ignore[attr-defined]
        part = c.src_view.of(sources[c.src_rank][c.src_tensor])[tuple(slice(*p) for p in c.src_box)]
        c.dst_view.of(destinations[c.dst_rank][c.dst_tensor])[tuple(slice(*p) for p in c.dst_box)] = part.to(c.dtype)
    for pad in plan.paddings:  # type: ignore[attr-defined]
        pad.view.of(destinations[pad.rank][pad.tensor])[tuple(slice(*p) for p in pad.box)] = 0
