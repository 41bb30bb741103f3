"""FP8 weights: the bits that travel are those of the assembled tensor quantised, wherever shards cut; scales are never lost or guessed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig, MoE
from parallel.quantization import BlockFP8, read_quantization
from resharding.boxes import shape_of, slices
from resharding.checksum import verify
from resharding.errors import WeightsError
from resharding.fp8 import decoded, dequantise, dequantise_region, quantise, quantise_region, region_amax, touched
from resharding.layout import Layout, Listed, canonical_blocks, empty_tensors
from resharding.layouts import hf_layout, mcore_layout, mcore_party, trtllm_party
from resharding.layouts.fp8 import fp8_blocks, fp8_layout, fp8_party, fp8_weights, scaled_party
from resharding.piece_sums import piece_checksums
from resharding.plan import Plan, make_plan
from resharding.transform import CAST, Fp8Source
from resharding.transport import in_place
from resharding.transport.choose import execute
from tests.conftest import SHARED
from tests.resharding.direct import Tensors, assert_same, canonical_tensors, cast, mcore_shard, tiny, trtllm_shard
from tests.worker_pool import run_ranks

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16


def by_hand(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales block by block, in the words of the format."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=E4M3)
    scale = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            part = weight[here].float()
            largest = float(part.abs().max())
            scale[i, j] = torch.tensor(largest) / 448 if largest else 1.0
            codes[here] = (part / scale[i, j]).to(E4M3)
    return codes, scale


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def same(found: Tensors, expected: Tensors) -> None:
    assert_same({n: bits(t) for n, t in found.items()}, {n: bits(t) for n, t in expected.items()})


def sizes() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(1, 300), st.integers(1, 300))


@settings(max_examples=25, deadline=None)
@given(sizes(), st.sampled_from([(128, 128), (1, 128), (64, 32)]), st.sampled_from([BF16, torch.float32, torch.float16]), st.integers(0, 9))
def test_codes_and_scales_are_those_of_the_format(shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)
    weight[:block[0], :block[1]] = 0  # a block of zeros
    codes, scale = quantise(weight, block)
    expected_codes, expected_scale = by_hand(weight, block)
    assert torch.equal(scale, expected_scale) and torch.equal(bits(codes), bits(expected_codes))
    back = dequantise(codes, scale, block, torch.float32)
    grid = scale.repeat_interleave(block[0], 0)[:shape[0]].repeat_interleave(block[1], 1)[:, :shape[1]]
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of a value, or half of 2^-9 below the smallest normal number
    assert bool(((back - weight.float()).abs() <= torch.maximum(weight.float().abs() / 16, grid * 2 ** -10) * 1.001).all())
    assert not back[:block[0], :block[1]].any()


@settings(max_examples=40, deadline=None)
@given(sizes(), st.sampled_from([(128, 128), (16, 8)]), st.data())
def test_any_region_gives_the_bits_of_the_whole(shape: tuple[int, int], block: tuple[int, int], data: st.DataObject) -> None:
    region = tuple(data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(sorted).filter(lambda p: p[0] < p[1])) for n in shape)
    region = tuple((a, b) for a, b in region)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(BF16)
    codes, scale = by_hand(weight, block)
    blocks = touched(region, block)
    found = quantise_region(weight[slices(region)], scale[slices(blocks)], region, block)
    assert torch.equal(bits(found), bits(codes[slices(region)]))
    whole = torch.stack([codes[i].float() * scale[i // block[0]].repeat_interleave(block[1])[:shape[1]] for i in range(shape[0])])
    assert torch.equal(dequantise_region(codes[slices(region)], scale, region, block, torch.float32), whole[slices(region)])
    inner = torch.zeros(shape)
    inner[slices(region)] = weight[slices(region)].float()
    assert torch.equal(region_amax(weight[slices(region)], region, block),
                       torch.stack([torch.stack([c.abs().max() for c in r.split(block[1], 1)]) for r in inner.split(block[0])])[slices(blocks)])


def test_values_too_small_for_a_scale_become_zeros_and_not_infinities() -> None:
    weight = torch.full((2, 2), 1e-38)
    codes, scale = quantise(weight)
    assert scale.tolist() == [[1.0]] and not codes.float().any()


def test_every_code_is_decoded_to_the_bits_of_its_value() -> None:
    codes = torch.arange(256).to(torch.uint8)
    finite = codes[codes & 0x7F != 0x7F]
    for some in (codes, finite, finite.view(2, 127)[:, ::3], finite[:0]):
        assert torch.equal(decoded(some.view(E4M3)).view(torch.int32), some.view(E4M3).float().view(torch.int32))
    assert float(decoded(torch.tensor([0x7E], dtype=torch.uint8).view(E4M3))) == 448 and decoded(codes.view(E4M3)).isnan().sum() == 2


def test_scales_must_belong_to_their_region() -> None:
    with pytest.raises(ValueError, match="cannot have scales"):
        quantise_region(torch.zeros(4, 4), torch.ones(1, 1), ((126, 130), (0, 4)))


# Case A11: directories with e4m3 codes and block scales

A11 = {"weight": torch.ones(200, 130).to(E4M3), "scale": torch.tensor([[1.0, 2.0], [4.0, 8.0]])}


def test_a11_dequantises_by_blocks_also_where_the_last_one_is_partial() -> None:
    back = dequantise(A11["weight"], A11["scale"], block_of({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}))
    assert back.dtype == BF16
    assert [float(back[i, j]) for i, j in ((0, 0), (127, 127), (127, 128), (128, 127), (199, 129))] == [1.0, 1.0, 2.0, 4.0, 8.0]
    assert float(back.float().sum()) == 128 * 128 * 1 + 128 * 2 * 2 + 72 * 128 * 4 + 72 * 2 * 8 == 54912.0
    stacked = dequantise(torch.ones(3, 200, 130).to(E4M3), A11["scale"].repeat(3, 1, 1))
    assert all(torch.equal(expert, back) for expert in stacked)


def test_a11_a_missing_or_wrong_scale_is_refused_by_name() -> None:
    for scale in (None, torch.ones(2, 1), torch.ones(200, 130)):
        with pytest.raises(UserError, match=r"model.x_proj.weight_scale_inv") as error:
            dequantise(A11["weight"], scale, name="model.x_proj.weight")
        assert "model.x_proj.weight [200, 130]" in str(error.value) and "[2, 2]" in str(error.value)
    with pytest.raises(UserError, match=r"experts_scale_inv has shape \[2, 2\]"):
        dequantise(torch.ones(3, 200, 130).to(E4M3), A11["scale"], name="experts")


def block_of(quantization: dict[str, Any]) -> tuple[int, int]:
    found = read_quantization({"model_type": "qwen3", "quantization_config": quantization})
    assert isinstance(found, BlockFP8)
    return found.block


def test_a11_the_block_size_is_configured_and_never_guessed() -> None:
    assert block_of({"quant_method": "fp8"}) == (128, 128)
    assert block_of({"quant_method": "fp8", "weight_block_size": [64, 32]}) == (64, 32)
    for bad, word in (({"quant_method": "gptq"}, "gptq"), ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"), ({"fmt": "e4m3"}, "quant_method")):
        with pytest.raises(UserError, match=word):
            block_of(bad)
    for size in (128, [128], [128, 0], [128.0, 128], None):
        with pytest.raises(UserError, match="weight_block_size"):
            block_of({"quant_method": "fp8", "weight_block_size": size})


def test_the_written_case_is_the_one_tested_here() -> None:
    path = SHARED / "cases/cases.jsonl"
    written = [json.loads(line) for line in path.read_text().splitlines() if '"A11"' in line] if path.is_file() else []
    for case in written:
        expected = case["expected"]["a"]
        back = dequantise(A11["weight"], torch.tensor(case["input"]["weight_scale_inv"])).float()
        assert float(back.sum()) == expected["sum_float32"]
        assert all(float(back[tuple(json.loads(at))]) == value for at, value in expected.items() if at.startswith("["))
    assert A11["scale"].tolist() == [[1.0, 2.0], [4.0, 8.0]]


# Which tensors are chosen, and the layouts that follow

def test_matrices_are_chosen_and_nothing_else() -> None:
    for family in ("llama", "qwen2_moe", "deepseek_v3", "gpt_oss"):
        model = tiny(family, num_layers=2)
        chosen = fp8_weights(model)
        shapes = {name: shape for block in canonical_blocks(model) for name, shape in block.items()}
        left = set(shapes) - set(chosen)
        assert all(shapes[name] == shape and len(shape) == 2 for name, shape in chosen.items())
        assert all(name.endswith("_proj.weight") or "kv_a_proj" in name for name in chosen)
        words = ("embed_tokens", "lm_head", "norm", ".gate.weight", "router", "bias", "sinks", "shared_expert_gate")
        assert all(any(word in name for word in words) for name in left), left
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in fp8_weights(tiny("mixtral"))
    kept = fp8_weights(tiny(), keep=["model.layers.0.mlp", "model.layers.1.self_attn.o_proj"])
    assert not any(".0.mlp." in name for name in kept) and "model.layers.1.self_attn.o_proj.weight" not in kept
    assert "model.layers.1.self_attn.q_proj.weight" in kept and "model.layers.1.mlp.up_proj.weight" in kept


def engine_model(family: str = "qwen3", **changes: Any) -> ModelConfig:
    """Whole blocks of (4, 4) at tp 1 and 2, partial ones where hidden_size ends; a trainer at tp 4 cuts blocks."""
    moe = dict(moe=MoE(num_experts=4, top_k=2, intermediate_size=24, layers=(0, 1))) if family == "qwen3_moe" else {}
    return tiny(family, **{**dict(hidden_size=10, intermediate_size=24, num_layers=2, head_dim=4), **moe, **changes})


BLOCK = (4, 4)


def expected_fp8(tensors: Tensors, chosen: tuple[str, ...], block: tuple[int, int] = BLOCK) -> Tensors:
    """A rank's bf16 or fp32 tensors with those named by `chosen` quantised as they are: shards that lie on blocks may be."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(chosen):
            out[name] = tensor
        elif tensor.dim() == 3:
            both = [by_hand(one, block) for one in tensor]
            out[name], out[name + "_scale_inv"] = torch.stack([c for c, _ in both]), torch.stack([s for _, s in both])
        else:
            out[name], out[name + "_scale_inv"] = by_hand(tensor, block)
    return out


CHOSEN = ("_proj.weight", "w3_w1_weight", "w2_weight")


def read_all(plan: Plan, transforms: dict[int, Fp8Source], sources: dict[int, Tensors], destinations: dict[int, Tensors]) -> None:
    """Run a plan of several ranks by the meaning of its copies, each read through its rank's transform."""
    for c in plan.copies:
        found = transforms[c.src_rank].read(c, sources[c.src_rank])
        assert tuple(found.shape) == shape_of(c.region) and found.dtype == c.dtype
        c.dst_view.of(destinations[c.dst_rank][c.dst_tensor])[slices(c.dst_box)] = found
    for pad in plan.paddings:
        pad.view.of(destinations[pad.rank][pad.tensor])[slices(pad.box)] = 0


def exchange(transforms: dict[int, Fp8Source], sources: dict[int, Tensors]) -> dict[int, Tensors]:
    """What `prepare` does, for all ranks in this process."""
    maxima = {rank: transform.maxima(sources[rank]) for rank, transform in transforms.items()}
    found = [m for m in maxima.values() if m is not None]
    together = torch.stack(found).amax(0) if found else None
    return {rank: {**sources[rank], **transform.scales(together)} for rank, transform in transforms.items()}


SOURCES = [ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(tp=4), ParallelConfig(tp=2, pp=2), ParallelConfig(tp=4, pp=2)]
EXPERT_SOURCES = [ParallelConfig(tp=2, ep=2, etp=1), ParallelConfig(tp=4, ep=2, etp=2), ParallelConfig(ep=4), ParallelConfig(tp=4, etp=4)]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_arrives_is_the_assembled_tensor_quantised_wherever_the_sources_cut_it(data: st.DataObject) -> None:
    model = engine_model(data.draw(st.sampled_from(["qwen3", "llama", "qwen3_moe"])), tied=data.draw(st.booleans()))
    par = data.draw(st.sampled_from(SOURCES + (EXPERT_SOURCES if model.moe else [])))
    dtype = data.draw(st.sampled_from([BF16, torch.float32]))
    world = max(par.tp, par.ep * par.expert_tp) * par.pp * data.draw(st.sampled_from([1, 2]))
    full = canonical_tensors(model, dtype)
    blocks, weights = canonical_blocks(model), fp8_weights(model)
    source = scaled_party(mcore_party(model, par, world, dtype), weights, len(blocks), BLOCK)
    if data.draw(st.booleans()):
        destination: Any = Listed([fp8_layout(hf_layout(model, dtype), weights, BLOCK)], fp8_blocks(blocks, weights, BLOCK))
        expected = {0: expected_fp8(full, CHOSEN)}
    else:
        tp, moe_ep = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
        destination = fp8_party(trtllm_party(model, (tuple(range(tp)),), dtype, moe_ep), weights, len(blocks), BLOCK)
        expected = {t: expected_fp8(trtllm_shard(full, model, tp, t, moe_ep), CHOSEN) for t in range(tp)}
    plan = make_plan(source, destination, fp8_blocks(blocks, weights, BLOCK))
    held = {rank: mcore_shard(full, model, par, rank, world) for rank in range(world)}
    transforms = {rank: Fp8Source(source, rank) for rank in range(world)}
    prepared = exchange(transforms, held)
    arrived = {rank: empty_tensors(destination.layout(rank)) for rank in expected}
    read_all(plan, transforms, prepared, arrived)
    for rank in expected:
        same(arrived[rank], expected[rank])
    check_sums(source, transforms, prepared, destination, arrived)


def check_sums(source: Any, transforms: dict[int, Fp8Source], prepared: dict[int, Tensors], destination: Any, arrived: dict[int, Tensors]) -> None:
    """The checksum of what arrived is what the sources compute through their transforms, and one flipped code bit is noticed."""
    layouts = [destination.layout(rank) for rank in arrived]
    dtypes = {p.canonical: t.dtype for layout in layouts for t in layout.tensors for p in t.pieces if p.canonical}
    sources = [source.layout(rank) for rank in transforms]
    sums = verify(sources, [piece_checksums(x, prepared[x.rank], dtypes, transforms[x.rank]) for x in sources])
    assert verify(layouts, [piece_checksums(x, arrived[x.rank]) for x in layouts], sums) == sums
    for name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight_scale_inv"):
        arrived[0][name].view(torch.uint8)[-1, -1] ^= 1
        with pytest.raises(WeightsError, match=name):
            verify(layouts, [piece_checksums(x, arrived[x.rank]) for x in layouts], sums)
        arrived[0][name].view(torch.uint8)[-1, -1] ^= 1


def test_scales_are_exchanged_only_where_blocks_are_cut() -> None:
    model = engine_model()
    weights, count = fp8_weights(model), len(canonical_blocks(model))
    aligned = scaled_party(mcore_party(model, ParallelConfig(tp=2), 2, BF16), weights, count, BLOCK)
    assert not aligned.exchanged and len(aligned.made) == len(weights)
    assert Fp8Source(aligned, 0).maxima(mcore_shard(canonical_tensors(model, BF16), model, ParallelConfig(tp=2), 0, 2)) is None
    cut = scaled_party(mcore_party(model, ParallelConfig(tp=4), 4, BF16), weights, count, BLOCK)
    assert {name.split(".")[-2] for name in cut.exchanged} == {"gate_proj", "up_proj", "down_proj"}


def test_weights_that_are_fp8_already_pass_through_bit_for_bit() -> None:
    """Codes that quantising anew would change: the largest magnitude of a block is not 448."""
    model = engine_model("qwen3_moe")
    blocks, weights = canonical_blocks(model), fp8_weights(model)
    inner = mcore_party(model, ParallelConfig(tp=2), 2, BF16)
    stored = scaled_party(fp8_party(inner, weights, len(blocks), BLOCK), weights, len(blocks), BLOCK)
    assert not stored.made
    g = torch.Generator().manual_seed(1)
    held: dict[int, Tensors] = {}
    for rank in range(2):
        tensors = mcore_shard(canonical_tensors(model, BF16), model, ParallelConfig(tp=2), rank, 2)
        for local in stored.layout(rank).tensors:
            if local.dtype == E4M3:
                tensors[local.name] = torch.randint(0, 100, local.shape, generator=g).to(torch.uint8).view(E4M3)
            elif local.name not in tensors:
                tensors[local.name] = torch.rand(local.shape, generator=g)
        held[rank] = tensors
    whole = {0: empty_tensors(destination := fp8_layout(hf_layout(model, BF16), weights, BLOCK))}
    transforms = {rank: Fp8Source(stored, rank) for rank in range(2)}
    read_all(make_plan(stored, [destination], fp8_blocks(blocks, weights, BLOCK)), transforms, exchange(transforms, held), whole)
    name = "model.layers.1.self_attn.o_proj.weight"
    local = "decoder.layers.1.self_attention.linear_proj.weight"
    for end in ("", "_scale_inv"):
        assert torch.equal(bits(whole[0][name + end]), bits(torch.cat([held[rank][local + end] for rank in range(2)], 1)))
    engine = fp8_party(trtllm_party(model, ((0, 1),), BF16), weights, len(blocks), BLOCK)
    first = {0: {n: t for n, t in whole[0].items()}}
    arrived = {rank: empty_tensors(engine.layout(rank)) for rank in range(2)}
    read_all(make_plan([destination], engine, fp8_blocks(blocks, weights, BLOCK)), {0: CAST}, first, arrived)  # type: ignore[dict-item]
    back = {0: empty_tensors(destination)}
    read_all(make_plan(engine, [destination], fp8_blocks(blocks, weights, BLOCK)), {0: CAST, 1: CAST}, arrived, back)  # type: ignore[dict-item]
    same(back[0], whole[0])


def test_half_the_bytes_travel() -> None:
    model = tiny(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=4, head_dim=64, num_layers=1)
    blocks, weights = canonical_blocks(model), fp8_weights(model)
    wide = make_plan(mcore_party(model, ParallelConfig(), 1, BF16), trtllm_party(model, ((1,),), BF16), blocks)
    narrow = make_plan(scaled_party(mcore_party(model, ParallelConfig(), 1, BF16), weights, len(blocks)),
                       fp8_party(trtllm_party(model, ((1,),), BF16), weights, len(blocks)), fp8_blocks(blocks, weights))
    matrices = sum(math.prod(shape) for shape in weights.values())
    assert wide.bytes_moved - narrow.bytes_moved == matrices - 4 * (matrices // (128 * 128))


# What is refused, by name

def test_shards_off_the_blocks_are_refused_with_what_would_fit() -> None:
    model = engine_model()
    weights, count = fp8_weights(model), len(canonical_blocks(model))
    party = fp8_party(trtllm_party(model, ((0, 1, 2, 3),), BF16), weights, count, BLOCK)
    with pytest.raises(UserError) as error:
        make_plan([hf_layout(model, BF16)], party, canonical_blocks(model))
    for part in ("mlp.gate_up_proj.weight", "rows [0, 6)", "model.layers.0.mlp.gate_proj.weight [24, 10]", "tp = 1, 2, 3, 6"):
        assert part in str(error.value)
    odd = engine_model(num_heads=3, num_kv_heads=3)  # q has 12 rows: k would begin in the middle of a block of 8
    with pytest.raises(UserError, match=r"qkv_proj.weight cannot be FP8: its rows \[0, 12\) of model.layers.0.self_attn.k_proj.weight.*from row 12"):
        fp8_layout(trtllm_party(odd, ((0,),), BF16).layout(0), fp8_weights(odd), (8, 4))


def test_a_fused_tensor_is_chosen_whole_or_not_at_all() -> None:
    model = engine_model()
    weights = fp8_weights(model, keep=["model.layers.1.self_attn.k_proj"])
    with pytest.raises(UserError, match=r"layers.1.self_attn.qkv_proj.weight cannot be FP8: it holds .*q_proj.weight.* and .*k_proj.weight"):
        fp8_layout(trtllm_party(model, ((0,),), BF16).layout(0), weights, BLOCK)
    interleaved = tiny("gpt_oss", num_layers=1)
    with pytest.raises(UserError, match="transposed"):
        fp8_layout(hf_layout(interleaved, BF16), fp8_weights(interleaved), BLOCK)


def test_codes_never_lose_their_scales() -> None:
    model = engine_model()
    weights, shapes = fp8_weights(model), canonical_blocks(model)
    full = canonical_tensors(model, BF16)
    quantised = fp8_layout(hf_layout(model, BF16), weights, BLOCK)
    codes_only = Layout("hf", 0, tuple(t for t in quantised.tensors if not t.name.endswith("_scale_inv")))
    for source, destination, held in ((hf_layout(model, BF16), codes_only, full),
                                      (codes_only, hf_layout(model, BF16), {t.name: full[t.name].to(t.dtype) for t in codes_only.tensors})):
        with pytest.raises(WeightsError, match=r"_proj.weight: .* takes block scales"):
            in_place.execute(make_plan([source], [destination], shapes), held, empty_tensors(destination), 0)
    party = scaled_party(Listed([hf_layout(model, BF16)], shapes), {}, len(shapes), BLOCK)
    transform = Fp8Source(party, 0)
    with pytest.raises(WeightsError, match=r"q_proj.weight is to arrive as FP8, but it is not among"):
        in_place.execute(make_plan([hf_layout(model, BF16)], [codes_only], shapes), transform.prepare(full), empty_tensors(codes_only), 0,
                         transform=transform)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float) -> None:
    model = engine_model()
    layout = hf_layout(model, BF16)
    full = canonical_tensors(model, BF16)
    transform = Fp8Source(scaled_party(Listed([layout], canonical_blocks(model)), fp8_weights(model), 4, BLOCK), 0)
    good = {name: t.clone() for name, t in transform.prepare(full).items()}
    full["model.layers.1.mlp.up_proj.weight"][3, 3] = value
    with pytest.raises(WeightsError, match="^model.layers.1.mlp.up_proj.weight: there are values that are not finite"):
        transform.prepare(full)
    full["model.layers.1.mlp.up_proj.weight"][3, 3] = good["model.layers.1.mlp.up_proj.weight"][3, 3] = 0.5
    again = transform.prepare(full)  # recovers
    same({n: again[n] for n in again if "up_proj" not in n}, {n: good[n] for n in good if "up_proj" not in n})


# Over real ranks: the exchange, and the transports

def move_between_ranks(block: tuple[int, int]) -> tuple[list[Tensors], dict[str, int]]:
    import torch.distributed as dist

    rank = dist.get_rank()
    model = engine_model(intermediate_size=36)  # tp 2 cuts gate, up and down in the middle of a block
    blocks, weights = canonical_blocks(model), fp8_weights(model)
    par = ParallelConfig(tp=2)
    source = scaled_party(mcore_party(model, par, 2, BF16), weights, len(blocks), block)
    assert source.exchanged
    destination = fp8_party(trtllm_party(model, ((0,), (1,)), BF16), weights, len(blocks), block)
    transform = Fp8Source(source, rank)
    plan = make_plan(source, destination, fp8_blocks(blocks, weights, block), rank=rank)
    mine = destination.layout(rank)
    moved = []
    for seed, transport in ((1, "auto"), (0, "point_to_point"), (0, "auto")):  # later moves of one transform reuse its buffers
        moved.append({name: t.view(torch.uint8).fill_(255).view(t.dtype) for name, t in empty_tensors(mine).items()})
        held = transform.prepare(mcore_shard(canonical_tensors(model, BF16, seed), model, par, rank, 2))
        execute(plan, held, moved[-1], rank, transform=transform, transport=transport)
    everyone: list[Any] = [None, None]
    dtypes = {p.canonical: t.dtype for t in mine.tensors for p in t.pieces if p.canonical}
    dist.all_gather_object(everyone, piece_checksums(source.layout(rank), held, dtypes, transform))
    return moved[1:], verify([source.layout(r) for r in range(2)], everyone)


def test_two_ranks_that_cut_blocks_quantise_as_one() -> None:
    model = engine_model(intermediate_size=36)
    expected = expected_fp8(trtllm_shard(canonical_tensors(model, BF16), model, 1, 0), CHOSEN)
    for rank, (moved, sums) in enumerate(run_ranks(2, move_between_ranks, BLOCK)):
        for arrived in moved:
            same(arrived, expected)
        layout = fp8_layout(trtllm_party(model, ((0,), (1,)), BF16).layout(rank), fp8_weights(model), BLOCK)
        assert verify([layout], [piece_checksums(layout, arrived)], sums) == sums


def test_a_real_block_size_on_a_model_of_real_proportions() -> None:
    """(128, 128) with sizes that leave partial blocks; the trainer cuts the middle of blocks."""
    model = tiny(hidden_size=192, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=128, num_layers=1)
    blocks, weights = canonical_blocks(model), fp8_weights(model)
    par = ParallelConfig(tp=4)
    full = cast(canonical_tensors(model), BF16)
    source = scaled_party(mcore_party(model, par, 4, BF16), weights, len(blocks))
    destination = fp8_party(trtllm_party(model, ((0, 1),), BF16), weights, len(blocks))
    transforms = {rank: Fp8Source(source, rank) for rank in range(4)}
    prepared = exchange(transforms, {rank: mcore_shard(full, model, par, rank, 4) for rank in range(4)})
    arrived = {rank: empty_tensors(destination.layout(rank)) for rank in range(2)}
    read_all(make_plan(source, destination, fp8_blocks(blocks, weights)), transforms, prepared, arrived)
    for rank in range(2):
        same(arrived[rank], expected_fp8(trtllm_shard(full, model, 2, rank), CHOSEN, (128, 128)))
    assert mcore_layout(model, par, 0, 4, BF16)["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (256, 192)
