"""The names, shapes and places of Megatron's distributed checkpoints, against a reference written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.model_config import ModelConfig
from resharding.boxes import volume, whole
from resharding.layout import canonical_shapes, empty_tensors
from resharding.layouts import hf_layout
from resharding.layouts.mcore_files import extra_states, mcore_files, mcore_files_layout
from resharding.plan import make_plan
from resharding.transport import in_place

SIZES: dict[str, Any] = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=21,
                             rope_theta=10000.0)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, head_dim=2)
LATENT: dict[str, Any] = dict(num_key_value_heads=4, q_lora_rank=6, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3,
                              n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, n_shared_experts=1, first_k_dense_replace=1,
                              n_group=1, topk_group=1)


def config(family: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": family, **SIZES, **changes}, make_vocab_size_divisible_by=8)


def numbered(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Canonical tensors, every element another number."""
    out, start = {}, 1
    for name, shape in canonical_shapes(model).items():
        n = torch.Size(shape).numel()
        out[name] = torch.arange(start, start + n, dtype=torch.float32).view(shape)
        start += n
    return out


def stored(model: ModelConfig, values: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    layout = mcore_files_layout(model, torch.float32, **options)
    out = empty_tensors(layout)
    in_place.execute(make_plan([hf_layout(model, torch.float32, experts="split")], [layout], canonical_shapes(model), source_is_everywhere=True),
                     values, out, 0)
    return out


def attention(model: ModelConfig, v: dict[str, torch.Tensor], layer: int, part: str) -> torch.Tensor:
    """linear_qkv of a layer: for every query group its query heads, its key head, its value head."""
    q, k, w = (v[f"model.layers.{layer}.self_attn.{x}_proj.{part}"] for x in "qkv")
    d, groups = model.head_dim, model.num_kv_heads
    rows = []
    for g in range(groups):
        n = model.num_heads // groups * d
        rows += [q[g * n:(g + 1) * n], k[g * d:(g + 1) * d], w[g * d:(g + 1) * d]]
    return torch.cat(rows)


def test_layers_of_a_dense_model_are_stacked() -> None:
    model = config("qwen2", tie_word_embeddings=False)
    v = numbered(model)
    layers = [f"model.layers.{i}." for i in range(3)]
    padding = torch.zeros(32 - 21, 8)
    want = {
        "embedding.word_embeddings.weight": torch.cat([v["model.embed_tokens.weight"], padding]),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": torch.stack([v[x + "input_layernorm.weight"] for x in layers]),
        "decoder.layers.self_attention.linear_qkv.weight": torch.stack([attention(model, v, i, "weight") for i in range(3)]),
        "decoder.layers.self_attention.linear_qkv.bias": torch.stack([attention(model, v, i, "bias") for i in range(3)]),
        "decoder.layers.self_attention.linear_proj.weight": torch.stack([v[x + "self_attn.o_proj.weight"] for x in layers]),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": torch.stack([v[x + "post_attention_layernorm.weight"] for x in layers]),
        "decoder.layers.mlp.linear_fc1.weight": torch.stack([torch.cat([v[x + "mlp.gate_proj.weight"], v[x + "mlp.up_proj.weight"]]) for x in layers]),
        "decoder.layers.mlp.linear_fc2.weight": torch.stack([v[x + "mlp.down_proj.weight"] for x in layers]),
        "decoder.final_layernorm.weight": v["model.norm.weight"],
        "output_layer.weight": torch.cat([v["lm_head.weight"], padding]),
    }
    have = stored(model, v, parallel=ParallelConfig(tp=4))
    assert have.keys() == want.keys()
    assert not [key for key in want if not torch.equal(have[key], want[key])]


def test_experts_are_stacked_below_layers() -> None:
    model = config("qwen3_moe", **EXPERTS)
    v = numbered(model)
    have = stored(model, v)
    for i in range(3):
        for e in range(4):
            x = f"model.layers.{i}.mlp.experts.{e}."
            fc1 = torch.cat([v[x + "gate_proj.weight"], v[x + "up_proj.weight"]])
            assert torch.equal(have["decoder.layers.mlp.experts.experts.linear_fc1.weight"][i, e], fc1)
            assert torch.equal(have["decoder.layers.mlp.experts.experts.linear_fc2.weight"][i, e], v[x + "down_proj.weight"])
        assert torch.equal(have["decoder.layers.pre_mlp_layernorm.weight"][i], v[f"model.layers.{i}.post_attention_layernorm.weight"])
        assert torch.equal(have["decoder.layers.self_attention.q_layernorm.weight"][i], v[f"model.layers.{i}.self_attn.q_norm.weight"])
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" not in have


def test_layers_of_two_kinds_have_keys_of_their_own() -> None:
    model = config("deepseek_v3", **LATENT)
    v = numbered(model)
    have = stored(model, v)
    a = "self_attention."
    for i in range(3):
        k, x = f"decoder.layers.{i}.", f"model.layers.{i}."
        for ours, theirs in ((a + "linear_q_down_proj.weight", "self_attn.q_a_proj.weight"), (a + "linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
                             (a + "linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
                             (a + "linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"), ("input_layernorm.weight", "input_layernorm.weight"),
                             (("mlp.linear_fc1.layer_norm_weight" if i == 0 else "pre_mlp_layernorm.weight"), "post_attention_layernorm.weight")):
            assert torch.equal(have[k + ours], v[x + theirs]), ours
    assert torch.equal(have["decoder.layers.2.mlp.experts.experts.linear_fc2.weight"][3], v["model.layers.2.mlp.experts.3.down_proj.weight"])
    assert torch.equal(have["decoder.layers.1.mlp.shared_experts.linear_fc2.weight"], v["model.layers.1.mlp.shared_experts.down_proj.weight"])
    assert have["decoder.layers.1.mlp.router.expert_bias"].dtype == torch.float32
    assert not [key for key in have if key.startswith("decoder.layers.mlp")]
    as_one = stored(config("qwen2"), numbered(config("qwen2")), apart=True)  # a run may store equal layers apart too
    assert "decoder.layers.1.mlp.linear_fc2.weight" in as_one and "decoder.layers.mlp.linear_fc2.weight" not in as_one


def test_a_tied_model_has_no_head() -> None:
    assert "output_layer.weight" not in stored(config("llama", tie_word_embeddings=True), numbered(config("llama", tie_word_embeddings=True)))


def test_names_of_the_local_spec_are_found() -> None:
    """Where a checkpoint holds a norm under another of Megatron's names, the layout takes that name."""
    moe, latent = config("qwen3_moe", **EXPERTS), config("deepseek_v3", **LATENT)
    held = {"decoder.layers.mlp.linear_fc1.layer_norm_weight", "decoder.layers.input_layernorm.weight"}
    names = mcore_files_layout(moe, torch.float32, held=held).by_name
    assert held <= names.keys() and "decoder.layers.pre_mlp_layernorm.weight" not in names
    held = {f"decoder.layers.{i}.self_attention.q_layernorm.weight" for i in range(3)} | {"decoder.layers.0.pre_mlp_layernorm.weight"}
    names = mcore_files_layout(latent, torch.float32, held=held).by_name
    assert held <= names.keys() and "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" not in names


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp=2, ep=2, etp=1), ParallelConfig(tp=2, pp=3, ep=4), ParallelConfig(tp=4, etp=3)])
def test_chunks_are_those_of_the_ranks_and_tile_every_tensor(parallel: ParallelConfig) -> None:
    model = config("qwen3_moe", **EXPERTS)
    etp = parallel.expert_tp
    cuts = {s.tensor.name.removeprefix("decoder.layers."): s.cuts for s in mcore_files(model, torch.float32, parallel)}
    assert cuts["self_attention.linear_qkv.weight"] == (3, parallel.tp, 1)
    assert cuts["self_attention.linear_proj.weight"] == (3, 1, parallel.tp)
    assert cuts["mlp.experts.experts.linear_fc1.weight"] == (3, 4, 2 * etp, 1)
    assert cuts["mlp.experts.experts.linear_fc2.weight"] == (3, 4, 1, etp)
    assert cuts["mlp.router.weight"] == (3, 1, 1) and cuts["embedding.word_embeddings.weight"] == (parallel.tp, 1)
    for s in mcore_files(model, torch.float32, parallel):
        boxes = list(s.chunks())
        assert len(set(boxes)) == len(boxes) and sum(map(volume, boxes)) == volume(whole(s.tensor.shape)), s.tensor.name
        covered = torch.zeros(s.tensor.shape)
        for box in boxes:
            covered[tuple(slice(a, b) for a, b in box)] += 1
        assert bool((covered == 1).all()), s.tensor.name


def test_objects_that_loaders_ask_for() -> None:
    stacked = extra_states(config("qwen3_moe", **EXPERTS))
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_2_3" in stacked
    assert "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_2.3_3.4" in stacked
    apart = extra_states(config("deepseek_v3", **LATENT))
    assert "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1" in apart
    assert "decoder.layers.2.mlp.experts.experts.linear_fc1._extra_state/shard_3_4" in apart
    assert len(set(stacked)) == len(stacked) and len(set(apart)) == len(apart)
