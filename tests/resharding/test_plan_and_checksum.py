"""Plans refuse what they do not cover; checksums find what a move or a fault has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.config import ParallelConfig
from resharding.boxes import Box, first_overlap, intersect, subtract, volume
from resharding.checksum import piece_checksums, region_checksum, verify
from resharding.errors import CoverageError, WeightsError
from resharding.layout import Layout, canonical_shapes, empty_tensors
from resharding.layouts import hf_layout, mcore_layout, trtllm_layout
from resharding.plan import make_plan
from resharding.transport import in_place
from tests.resharding.direct import canonical_tensors, mcore_shard, tiny, trtllm_shard

F32 = torch.float32
MODEL = tiny("qwen2")
SHAPES = canonical_shapes(MODEL)

boxes = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)).map(lambda p: (p[0], p[0] + p[1])), min_size=2, max_size=2).map(tuple)


@given(boxes, boxes)
def test_subtraction_leaves_exactly_the_rest(a: Box, b: Box) -> None:
    grid = torch.zeros(12, 12, dtype=torch.int)
    for box in subtract(a, b):
        grid[tuple(slice(*p) for p in box)] += 1
    expected = torch.zeros(12, 12, dtype=torch.int)
    expected[tuple(slice(*p) for p in a)] = 1
    expected[tuple(slice(*p) for p in b)] = 0
    assert torch.equal(grid, expected)
    assert (first_overlap((a, b)) is None) == (intersect(a, b) is None)


def trainer(tp: int = 2, pp: int = 1, dp: int = 1) -> list[Layout]:
    world = tp * pp * dp
    return [mcore_layout(MODEL, ParallelConfig(tp=tp, pp=pp), r, world, F32) for r in range(world)]


def engine(tp: int = 2) -> list[Layout]:
    return [trtllm_layout(MODEL, tp, r, r, F32) for r in range(tp)]


def without(layout: Layout, name: str) -> Layout:
    return replace(layout, tensors=tuple(t for t in layout.tensors if t.name != name))


def test_a_tensor_that_no_source_holds_is_refused_by_name() -> None:
    sources = [without(x, "output_layer.weight") for x in trainer()]
    with pytest.raises(CoverageError, match="no source holds all of lm_head.weight"):
        make_plan(sources, engine(), SHAPES)


def test_a_shard_that_is_missing_on_one_rank_only_is_refused() -> None:
    first, second = trainer()
    with pytest.raises(CoverageError, match=r"model.layers.2.self_attn.o_proj.weight"):
        make_plan([first, without(second, "decoder.layers.2.self_attention.linear_proj.weight")], engine(), SHAPES)


def test_a_canonical_tensor_that_no_destination_takes_is_refused_by_name() -> None:
    destinations = [without(x, "model.norm.weight") for x in engine()]
    with pytest.raises(CoverageError, match="no destination takes all of model.norm.weight"):
        make_plan(trainer(), destinations, SHAPES)
    assert make_plan(trainer(), destinations, SHAPES, read_all=False).copies


def test_overlapping_and_gaping_pieces_are_refused() -> None:
    layout = hf_layout(MODEL, F32)
    norm = layout["model.norm.weight"]
    for pieces, message in ((norm.pieces * 2, "written twice"), ((), "unwritten")):
        broken = replace(layout, tensors=(*(t for t in layout.tensors if t != norm), replace(norm, pieces=pieces)))
        with pytest.raises(CoverageError, match=f"model.norm.weight.*{message}"):
            make_plan(trainer(), [broken], SHAPES)


def test_own_rank_comes_first_and_replicas_share_the_sending() -> None:
    plan = make_plan(trainer(tp=2, dp=2), engine(2), SHAPES)
    assert {(c.src_rank, c.dst_rank) for c in plan.copies if c.src_rank == c.dst_rank} == {(0, 0), (1, 1)}
    replicas = trainer(tp=1, dp=4)  # all four hold everything; two more ranks hold an engine and no trainer
    apart = [trtllm_layout(MODEL, 2, t, 4 + t, F32) for t in range(2)]
    sent = make_plan(replicas, apart, SHAPES).bytes_sent
    assert set(sent) == {0, 1, 2, 3} and max(sent.values()) < 1.5 * min(sent.values())
    assert make_plan(replicas, [trtllm_layout(MODEL, 4, t, t, F32) for t in range(4)], SHAPES).bytes_moved == 0


def test_the_plan_counts_its_bytes() -> None:
    plan = make_plan(trainer(2), [trtllm_layout(MODEL, 1, 0, 0, torch.bfloat16)], SHAPES)
    elements = sum(volume(tuple((0, n) for n in shape)) for shape in SHAPES.values())
    assert plan.bytes_written == 2 * elements
    assert 0.3 * plan.bytes_written < plan.bytes_moved < 0.5 * plan.bytes_written  # norms are at home already


def sums(dtype: torch.dtype = F32) -> tuple[dict[str, torch.Tensor], dict[str, int], Layout]:
    full = canonical_tensors(MODEL)
    layout = hf_layout(MODEL, F32)
    return full, verify([layout], [piece_checksums(layout, full, dtype)]), layout


def test_the_checksum_is_the_sum_its_docstring_states() -> None:
    """Against plain Python integers: splitmix64 weights, bits of the fp32 value, modulo 2^64."""
    mask = (1 << 64) - 1

    def weight(dim: int, i: int) -> int:
        x = (i + 1 + (dim << 40)) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return (x ^ x >> 31) | 1

    full, found, _ = sums()
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        bits = full[name].view(torch.int32)
        rows = bits.reshape(bits.shape[0], -1).tolist()
        two_dimensional = bits.dim() == 2
        total = sum(b * weight(0, r) * (weight(1, c) if two_dimensional else 1) for r, row in enumerate(rows) for c, b in enumerate(row))
        assert found[name] == total & mask


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found_and_named(data: st.DataObject) -> None:
    _, expected, _ = sums()
    layouts = engine(2)
    held = [trtllm_shard(canonical_tensors(MODEL), MODEL, 2, t) for t in range(2)]
    rank = data.draw(st.integers(0, 1))
    local = data.draw(st.sampled_from(layouts[rank].tensors))
    piece = data.draw(st.sampled_from([p for p in local.pieces if p.canonical]))
    at = tuple(data.draw(st.integers(a, b - 1)) for a, b in piece.place)
    held[rank][local.name] = held[rank][local.name].clone()
    held[rank][local.name].view(torch.int32)[at] ^= 1 << data.draw(st.integers(0, 30))
    with pytest.raises(WeightsError, match=piece.canonical):
        verify(layouts, [piece_checksums(x, t) for x, t in zip(layouts, held)], expected)


def test_swapped_rows_columns_shards_and_tensors_are_found() -> None:
    full, expected, layout = sums()
    q, k, v = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
    rows, columns = torch.arange(8), torch.arange(8)
    rows[[1, 5]] = rows[[5, 1]]
    columns[[2, 3]] = columns[[3, 2]]
    for name, tensor in ((q, full[q][rows]), (q, full[q][:, columns]), (q, full[q].roll(4, 0)), (q, full[q].T.contiguous()), (k, full[v])):
        with pytest.raises(WeightsError, match=name):
            verify([layout], [piece_checksums(layout, {**full, name: tensor})], expected)


def test_padding_does_not_count() -> None:
    _, expected, _ = sums()
    layouts = engine(2)
    held = [trtllm_shard(canonical_tensors(MODEL), MODEL, 2, t) for t in range(2)]
    held[1]["lm_head.weight"][-1] = 7.0  # 13 rows over 2 ranks: the last is padding
    assert verify(layouts, [piece_checksums(x, t) for x, t in zip(layouts, held)], expected) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_the_checksum_is_of_the_values_after_the_cast_and_changes_nothing(dtype: torch.dtype) -> None:
    full, expected, layout = sums(dtype)
    cast = {name: tensor.to(dtype) for name, tensor in full.items()}
    before = {name: tensor.clone() for name, tensor in cast.items()}
    assert verify([layout], [piece_checksums(hf_layout(MODEL, dtype), cast)]) == expected
    assert all(torch.equal(before[name].view(torch.uint8), cast[name].view(torch.uint8)) for name in cast)


def test_large_tensors_in_many_chunks_have_the_sum_of_their_parts() -> None:
    x = torch.randn(3000, 1000)
    parts = [((0, 1700), (0, 1000)), ((1700, 3000), (0, 3)), ((1700, 3000), (3, 1000))]
    total = sum(int(region_checksum(x[tuple(slice(*p) for p in box)], box, F32)) for box in parts)
    assert (total - int(region_checksum(x, ((0, 3000), (0, 1000)), F32))) % (1 << 64) == 0


@pytest.mark.parametrize("parallel", [ParallelConfig(pp=2), ParallelConfig(pp=2, vpp=2), ParallelConfig(tp=2, pp=2)])
def test_a_tied_copy_that_has_drifted_is_refused(parallel: ParallelConfig) -> None:
    model = tiny("qwen2", tied=True)
    world = parallel.tp * parallel.pp
    full = canonical_tensors(model)
    layouts = [mcore_layout(model, parallel, r, world, F32) for r in range(world)]
    held = [{n: t.clone() for n, t in mcore_shard(full, model, parallel, r, world).items()} for r in range(world)]
    verify(layouts, [piece_checksums(x, t) for x, t in zip(layouts, held)])
    name = next(n for n in held[-1] if n.endswith("output_layer.weight"))
    held[-1][name][0, 0] += 1e-3
    with pytest.raises(WeightsError, match=f"model.embed_tokens.weight: .*{name} on rank {world - 1}"):
        verify(layouts, [piece_checksums(x, t) for x, t in zip(layouts, held)])


def test_uninitialised_destinations_are_filled_completely() -> None:
    layout = trtllm_layout(MODEL, 2, 1, 0, F32)
    tensors = {name: t.fill_(float("nan")) for name, t in empty_tensors(layout).items()}
    plan = make_plan([hf_layout(MODEL, F32)], [layout], SHAPES, read_all=False)
    report = in_place.execute(plan, canonical_tensors(MODEL), tensors, 0)
    assert not any(t.isnan().any() for t in tensors.values())
    assert report.bytes == plan.bytes_written
    with pytest.raises(WeightsError, match="must travel from rank 1 to rank 0"):
        in_place.execute(make_plan(trainer(), engine(1), SHAPES), {}, {}, 0)
