"""What the layouts must hold, in numbers one can read; every family and size against plain slicing is in test_families.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.layout import canonical_shapes, empty_tensors
from resharding.layouts import hf_layout, mcore_layout, trtllm_layout
from resharding.plan import make_plan
from tests.resharding.direct import canonical_tensors, simulate, tiny


def moved(layouts: list, full: dict[str, torch.Tensor], model: ModelConfig) -> list[dict[str, torch.Tensor]]:
    out = {x.rank: empty_tensors(x) for x in layouts}
    simulate(make_plan([hf_layout(model, torch.float32)], layouts, canonical_shapes(model)), {0: full}, out)
    return [out[x.rank] for x in layouts]


def test_qkv_bias_is_interleaved_by_query_group_like_the_weight() -> None:
    model = tiny("qwen2", head_dim=16, hidden_size=64)
    full = canonical_tensors(model)
    for kind in ("weight", "bias"):
        for x, base in (("q", 0), ("k", 10), ("v", 20)):
            tensor = full[f"model.layers.0.self_attn.{x}_proj.{kind}"]
            for head in range(tensor.shape[0] // 16):
                tensor[head * 16:(head + 1) * 16] = base + head
    for tp, expected in ((1, [[0, 1, 10, 20, 2, 3, 11, 21]]), (2, [[0, 1, 10, 20], [2, 3, 11, 21]])):
        ranks = moved([mcore_layout(model, ParallelConfig(tp=tp), r, tp, torch.float32) for r in range(tp)], full, model)
        for kind in ("weight", "bias"):
            found = [t[f"decoder.layers.0.self_attention.linear_qkv.{kind}"].flatten(1 if kind == "weight" else 0) for t in ranks]
            blocks = [(x[:, 0] if x.dim() == 2 else x)[::16].int().tolist() for x in found]
            assert blocks == expected


def test_only_the_families_with_a_bias_have_one() -> None:
    assert not [name for name in canonical_shapes(tiny("llama")) if name.endswith("bias")]
    biases = {name.split("self_attn.")[1] for name in canonical_shapes(tiny("qwen2")) if name.endswith("bias")}
    assert biases == {"q_proj.bias", "k_proj.bias", "v_proj.bias"}


def test_gate_and_up_are_fused_within_each_rank() -> None:
    model = tiny(intermediate_size=8, hidden_size=4, num_layers=1)
    full = canonical_tensors(model)
    full["model.layers.0.mlp.gate_proj.weight"] = torch.arange(8.0)[:, None].expand(8, 4).contiguous()
    full["model.layers.0.mlp.up_proj.weight"] = 100 + torch.arange(8.0)[:, None].expand(8, 4).contiguous()
    trainer = [mcore_layout(model, ParallelConfig(tp=2), r, 2, torch.float32) for r in range(2)]
    held = moved(trainer, full, model)
    fc1 = [t["decoder.layers.0.mlp.linear_fc1.weight"][:, 0].int().tolist() for t in held]
    assert fc1 == [[0, 1, 2, 3, 100, 101, 102, 103], [4, 5, 6, 7, 104, 105, 106, 107]]
    expected = {1: [[*range(8), *range(100, 108)]], 2: fc1, 4: [[0, 1, 100, 101], [2, 3, 102, 103], [4, 5, 104, 105], [6, 7, 106, 107]]}
    x = torch.randn(3, 4)
    gate, up, down = (full[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    whole = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    for tp, rows in expected.items():
        engine = [trtllm_layout(model, tp, r, r, torch.float32) for r in range(tp)]
        ranks = {e.rank: empty_tensors(e) for e in engine}
        simulate(make_plan(trainer, engine, canonical_shapes(model)), dict(enumerate(held)), ranks)
        assert [ranks[r]["model.layers.0.mlp.gate_up_proj.weight"][:, 0].int().tolist() for r in range(tp)] == rows
        partial = torch.zeros_like(whole)
        for tensors in ranks.values():
            g, u = (x @ tensors["model.layers.0.mlp.gate_up_proj.weight"].T).chunk(2, -1)
            partial += (torch.nn.functional.silu(g) * u) @ tensors["model.layers.0.mlp.down_proj.weight"].T
        torch.testing.assert_close(partial, whole, rtol=1e-6, atol=1e-4)


def test_vocabulary_padding_has_megatrons_sizes_and_is_zero() -> None:
    model = tiny(vocab_size=203, num_kv_heads=4, make_vocab_size_divisible_by=8)
    full = canonical_tensors(model)
    ranks = moved([mcore_layout(model, ParallelConfig(tp=4), r, 4, torch.float32) for r in range(4)], full, model)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert [t[name].shape[0] for t in ranks] == [56] * 4
        assert torch.cat([t[name] for t in ranks])[203:].abs().sum() == 0
    for tp in (1, 2):
        layouts = [mcore_layout(model, ParallelConfig(tp=tp), r, tp, torch.float32) for r in range(tp)]
        assert sum(layout["output_layer.weight"].shape[0] for layout in layouts) == 208


@pytest.mark.parametrize("parallel", [ParallelConfig(pp=2), ParallelConfig(pp=4), ParallelConfig(pp=2, vpp=2), ParallelConfig(tp=2, pp=2)])
def test_a_tied_model_in_stages_has_the_embedding_at_both_ends(parallel: ParallelConfig) -> None:
    model = tiny("qwen2", tied=True)
    world = parallel.tp * parallel.pp
    ranks = moved([mcore_layout(model, parallel, r, world, torch.float32) for r in range(world)], canonical_tensors(model), model)
    prefix = ("chunk0.", f"chunk{parallel.chunks - 1}.") if parallel.chunks > 1 else ("", "")
    for t in range(parallel.tp):
        first, last = ranks[t], ranks[world - parallel.tp + t]
        assert torch.equal(first[prefix[0] + "embedding.word_embeddings.weight"], last[prefix[1] + "output_layer.weight"])


def test_an_engine_that_owns_a_tied_head_receives_the_embedding() -> None:
    model = tiny("qwen2", tied=True)
    full = canonical_tensors(model)
    with_head, without = (moved([trtllm_layout(model, 1, 0, 0, torch.float32, tied_head=h)], full, model)[0] for h in (True, False))
    assert torch.equal(with_head["lm_head.weight"], full["model.embed_tokens.weight"])
    assert "lm_head.weight" not in without and set(with_head) == {*without, "lm_head.weight"}


def test_a_critic_asks_for_no_head() -> None:
    model = tiny("qwen2", tied=False)
    layout = mcore_layout(model, ParallelConfig(pp=2), 1, 2, torch.float32, head=False)
    assert "decoder.final_layernorm.weight" in layout.by_name and "output_layer.weight" not in layout.by_name


def test_transformer_engine_names_fuse_the_norms_into_the_linears() -> None:
    model = tiny("qwen2")
    local, te = (mcore_layout(model, ParallelConfig(), 0, 1, torch.float32, names=n) for n in ("local", "te"))
    renamed = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
               "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
    expected = []
    for tensor in local.tensors:
        name = tensor.name
        for old, new in renamed.items():
            name = name.replace(old, new)
        expected.append((name, tensor.pieces))
    assert [(t.name, t.pieces) for t in te.tensors] == expected


def test_sizes_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"tp=4 does not divide the rows of model.layers.0.mlp.gate_proj.weight: 6"):
        trtllm_layout(tiny(intermediate_size=6), 4, 0, 0, torch.float32)
    with pytest.raises(UserError, match="tp=3 does not divide num_attention_heads 4"):
        trtllm_layout(tiny(), 3, 0, 0, torch.float32)
    with pytest.raises(UserError, match="tp=4 is not a multiple of num_key_value_heads 3"):
        trtllm_layout(tiny(num_heads=12, num_kv_heads=3), 4, 0, 0, torch.float32)


words = st.text("ttttE|L,m", min_size=1, max_size=4)
repeats = st.builds("{}*{}".format, st.one_of(st.sampled_from("tE|L"), words.map("({})".format)), st.integers(0, 3))
layout_strings = st.lists(st.one_of(words, repeats), max_size=5).map("".join)


@settings(max_examples=100, deadline=None)
@given(layout_strings, st.sampled_from([(2, None), (3, None), (2, 2)]))
def test_a_stage_layout_is_read_as_megatron_reads_it(middle: str, sizes: tuple[int, int | None]) -> None:
    """Where we accept a string Megatron does, with the same layers on every stage; where Megatron refuses one so do we."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    pp, vpp = sizes
    text = f"E{middle}L"
    try:
        theirs = PipelineParallelLayerLayout(text, pp)
        theirs.validate_layer_layout(theirs.flatten_layout.count(LayerType.decoder), 0)
        stages = len(theirs.layout[0]) * pp
        counts = [theirs.layout[i % pp][i // pp].count(LayerType.decoder) for i in range(stages)] if stages == pp * (vpp or 1) else None
    except AssertionError:
        counts = None
    if counts is None or not sum(counts):
        with pytest.raises(UserError, match="pipeline_layout"):
            ParallelConfig(pp=pp, vpp=vpp, pipeline_layout=text).layer_counts(tiny())
    else:
        assert ParallelConfig(pp=pp, vpp=vpp, pipeline_layout=text).layer_counts(tiny(num_layers=sum(counts))) == counts


@pytest.mark.parametrize("refused", ["E tt|ttL", "E(tt)|ttL", "E((t)*2|)*1ttL", "tt|ttL", "Ett|tt", "EEtt|ttL", "Ettm|tL"])
def test_a_stage_layout_that_megatron_cannot_read_is_refused_with_the_way_to_write_it(refused: str) -> None:
    with pytest.raises(UserError, match=r"made of E .*, t .* and L .*t\*3 and \(t\|\)\*3 repeat"):
        ParallelConfig(pp=2, pipeline_layout=refused)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_uneven_stages_have_megatrons_sizes(pp: int) -> None:
    """get_num_layers_to_build for every number of layers on the first and last stage; where it refuses or loses layers, so do we."""
    from types import SimpleNamespace

    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    agreed = 0
    for layers in range(1, 9):
        for first in (None, 1, 2, 3):
            for last in (None, 1, 2, 3):
                config = SimpleNamespace(num_layers=layers, pipeline_model_parallel_size=pp, num_layers_in_first_pipeline_stage=first,
                                         num_layers_in_last_pipeline_stage=last, pipeline_model_parallel_layout=None,
                                         virtual_pipeline_model_parallel_size=None, account_for_embedding_in_pipeline_split=False,
                                         account_for_loss_in_pipeline_split=False)
                try:
                    expected = [get_num_layers_to_build(config, pp_rank=rank) for rank in range(pp)]
                except AssertionError:
                    expected = []
                parallel = ParallelConfig(pp=pp, first_stage_layers=first, last_stage_layers=last)
                if sum(expected) != layers or min(expected) < 0:
                    with pytest.raises(UserError, match="layers"):
                        parallel.layer_counts(tiny(num_layers=layers))
                else:
                    agreed += 1
                    assert parallel.layer_counts(tiny(num_layers=layers)) == expected
                    assert [n for rank in range(pp) for n in parallel.layers(tiny(num_layers=layers), rank)] == list(range(layers))
    assert agreed > 15
