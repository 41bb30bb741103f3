"""Plans refuse what they do not cover; checksums find what a move or a fault has changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.config import ParallelConfig
from resharding.boxes import Box, first_overlap, intersect, subtract, volume
from resharding.checksum import region_checksum, verify
from resharding.errors import CoverageError, WeightsError
from resharding.layout import Layout, canonical_shapes, empty_tensors
from resharding.layouts import hf_layout, mcore_layout, trtllm_layout
from resharding.piece_sums import piece_checksums
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


def weights_by_hand(stream: int, count: int) -> np.ndarray:
    """splitmix64 in unsigned arithmetic, which numpy does modulo 2^64."""
    x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (x ^ x >> np.uint64(31)) | np.uint64(1)


def checksum_by_hand(full: torch.Tensor) -> int:
    """The docstring's sum, word by word: rows of little-endian 64-bit words, the last of each filled up with zeros."""
    array = full.contiguous().view(torch.uint8).numpy()
    rows = array.reshape(-1, array.shape[-1])
    words = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8))).view("<u8")
    leading = full.shape[:-2] if full.dim() > 1 else ()
    row = np.arange(len(words)) % (full.shape[-2] if full.dim() > 1 else 1)
    weight = weights_by_hand(1, words.shape[1] // 64 + 1)[np.arange(words.shape[1]) // 64][None].repeat(len(words), 0)
    weight[row % 64 == 0] += np.uint64(2) * weights_by_hand(0, words.shape[1])
    weight *= weights_by_hand(2, row.max() + 1)[row][:, None]
    for dim, index in enumerate(np.unravel_index(np.arange(len(words)) // (row.max() + 1), leading) if leading else ()):
        weight *= weights_by_hand(2 + len(leading) - dim, leading[dim])[index][:, None]
    return int((words * weight).sum(dtype=np.uint64))


DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(200, 1024), (130, 96), (65, 530), (3, 1), (4099,), (7,), (3, 70, 65), (2, 2, 66, 8)])
def test_the_checksum_is_the_sum_its_docstring_states(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert int(region_checksum(x, tuple((0, n) for n in shape), dtype)) % 2 ** 64 == checksum_by_hand(x)


def memory(values: torch.Tensor, how: str) -> torch.Tensor:
    """The same values laid out in memory in another way."""
    if how == "transposed":
        return values.T.contiguous().T
    wide = torch.zeros(values.shape[0], values.shape[1] + 7, dtype=values.dtype)
    start = {"odd start": 3, "odd stride": 0}.get(how)
    if start is None:
        return values.clone()
    wide[:, start:start + values.shape[1]] = values
    return wide[:, start:start + values.shape[1]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_adds_up_to_the_whole(data: st.DataObject) -> None:
    """Cuts anywhere, in parts that lie in memory anyhow and may be held in a wider dtype than they arrive in."""
    dtype = data.draw(st.sampled_from(DTYPES))
    per_block = 512 // dtype.itemsize
    shape = data.draw(st.tuples(st.integers(1, 140), st.integers(1, 3 * per_block)))
    held = data.draw(st.sampled_from([dtype, torch.float32]))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(held)
    grain = data.draw(st.sampled_from([1, per_block // 64, per_block // 4, per_block]))
    cuts = [sorted({0, n, *(data.draw(st.lists(st.integers(0, n // g), max_size=3).map(lambda c, g=g: [g * i for i in c])))})
            for n, g in zip(shape, (1, grain))]
    total = 0
    for rows in zip(cuts[0], cuts[0][1:]):
        for columns in zip(cuts[1], cuts[1][1:]):
            part = memory(x[slice(*rows), slice(*columns)], data.draw(st.sampled_from(["plain", "transposed", "odd start", "odd stride"])))
            total += int(region_checksum(part, (rows, columns), dtype))
    assert total % 2 ** 64 == checksum_by_hand(x.to(dtype))


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


def test_checksums_of_another_layout_are_refused() -> None:
    full, _, layout = sums()
    values = piece_checksums(layout, full)
    for wrong in (values[:-1], [*values, 0]):
        with pytest.raises(ValueError, match="checksums of rank 0 do not belong to its hf layout"):
            verify([layout], [wrong])


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


def moved(x: torch.Tensor, dim: int, a: int, b: int, width: int) -> torch.Tensor:
    """`x` with [a, a + width) and [b, b + width) of one dimension swapped."""
    out = x.clone()
    out.narrow(dim, a, width).copy_(x.narrow(dim, b, width))
    out.narrow(dim, b, width).copy_(x.narrow(dim, a, width))
    return out


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_in_another_place_is_noticed(data: st.DataObject) -> None:
    """Rows, shards of rows, heads and single columns of a matrix, blocks of 512 bytes of a single row."""
    x = torch.randn(140, 1024, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    region = ((0, 140), (0, 1024))
    what = data.draw(st.sampled_from(["rows", "columns", "blocks of a row"]))
    if what == "blocks of a row":
        row = data.draw(st.integers(0, 139))
        a, b = sorted(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True)))
        changed = x.clone()
        changed[row] = moved(x[row:row + 1], 1, a * 256, b * 256, 256)[0]
    else:
        dim, size = (0, 140) if what == "rows" else (1, 1024)
        width = data.draw(st.sampled_from([1, 2, 32, 64]))
        a = data.draw(st.integers(0, size - 2 * width))
        changed = moved(x, dim, a, data.draw(st.integers(a + width, size - width)), width)
    assert int(region_checksum(changed, region, x.dtype)) != int(region_checksum(x, region, x.dtype))


def test_what_the_docstring_says_goes_unnoticed_does() -> None:
    """A test of the docstring, not a wish: words inside one block of a row that is not a multiple of 64, and top bits."""
    x = torch.randn(140, 1024, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    for row, noticed in ((63, False), (64, True), (65, False)):
        changed = x.clone()
        changed[row] = moved(x[row:row + 1], 1, 8, 100, 4)[0]
        assert (int(region_checksum(changed, ((0, 140), (0, 1024)), x.dtype)) != int(region_checksum(x, ((0, 140), (0, 1024)), x.dtype))) is noticed
    signs = torch.ones(64, 8)
    signs[0, 1] = -1
    other = torch.ones(64, 8)
    other[5, 3] = -1
    assert int(region_checksum(signs, ((0, 64), (0, 8)), F32)) == int(region_checksum(other, ((0, 64), (0, 8)), F32))


def test_swapped_experts_and_shards_of_an_engine_are_found() -> None:
    model = tiny("qwen3_moe")
    full = canonical_tensors(model)
    hf = hf_layout(model, F32)
    expected = verify([hf], [piece_checksums(hf, full)])
    layouts = [trtllm_layout(model, 2, t, t, F32) for t in range(2)]
    held = [trtllm_shard(full, model, 2, t) for t in range(2)]
    assert verify(layouts, [piece_checksums(x, t) for x, t in zip(layouts, held)], expected) == expected
    for name in ("w3_w1_weight", "w2_weight"):
        key = f"model.layers.1.mlp.experts.{name}"
        with pytest.raises(WeightsError, match=r"layers.1.mlp.experts.[12]"):
            permuted = {**held[0], key: held[0][key][[0, 2, 1, 3]]}
            verify(layouts, [piece_checksums(layouts[0], permuted), piece_checksums(layouts[1], held[1])], expected)
        with pytest.raises(WeightsError, match=r"layers.1.mlp.experts.0"):
            swapped = [{**t, key: other[key]} for t, other in zip(held, held[::-1])]
            verify(layouts, [piece_checksums(x, t) for x, t in zip(layouts, swapped)], expected)


def test_large_tensors_in_many_chunks_have_the_sum_of_their_parts() -> None:
    x = torch.randn(3000, 1001)
    parts = [((0, 1700), (0, 1001)), ((1700, 3000), (0, 3)), ((1700, 3000), (3, 1001))]
    total = sum(int(region_checksum(x[tuple(slice(*p) for p in box)], box, torch.bfloat16)) for box in parts)
    assert total % 2 ** 64 == checksum_by_hand(x.to(torch.bfloat16))


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
