"""Every family in every layout: what a plan fills is what plain slicing of the full tensors gives, bit for bit."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel.config import ParallelConfig
from parallel.families import FAMILIES
from parallel.model_config import ModelConfig
from resharding import piece_sums
from resharding.boxes import volume
from resharding.checksum import region_checksum, verify
from resharding.errors import CoverageError
from resharding.layout import Layout, Party, canonical_blocks, canonical_shapes, empty_tensors
from resharding.layouts import hf_layout, mcore_party, trtllm_party
from resharding.layouts.trtllm_engine import trtllm_engine_layout
from resharding.piece_sums import PieceSums, piece_checksums
from resharding.plan import Plan, make_plan
from tests.resharding.direct import (
    ENGINE_FAMILIES,
    MOE_FAMILIES,
    Tensors,
    assert_same,
    canonical_tensors,
    cast,
    engine_shard,
    hf_files,
    mcore_shard,
    simulate,
    tiny,
    trtllm_shard,
)

F32 = torch.float32


@dataclass(frozen=True)
class Side:
    """One party of a move: how the product describes it, and how each rank's tensors are built by hand."""

    text: str
    party: Party | Sequence[Layout]
    layouts: tuple[Layout, ...]
    direct: Any  # rank -> Tensors

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text)

    def held(self, full: Tensors) -> dict[int, Tensors]:
        return {layout.rank: self.direct(full, layout.rank) for layout in self.layouts}

    def empty(self) -> dict[int, Tensors]:
        return {layout.rank: {n: t.fill_(float("nan")) for n, t in empty_tensors(layout).items()} for layout in self.layouts}


def hf_side(model: ModelConfig, experts: str, dtype: torch.dtype = F32) -> Side:
    layout = hf_layout(model, dtype, experts=experts)  # type: ignore[arg-type]
    return Side(f"hf {experts}", [layout], (layout,), lambda full, rank: cast(hf_files(full, model, experts), dtype))


def mcore_side(model: ModelConfig, par: ParallelConfig, world: int, names: str, counts: Sequence[int] | None = None, first: int = 0) -> Side:
    party = mcore_party(model, par, world, F32, names, first_rank=first)  # type: ignore[arg-type]
    return Side(f"mcore {par} world {world} {names} {counts}", party, tuple(party.layout(r) for r in party.ranks),
                lambda full, rank: mcore_shard(full, model, par, rank - first, world, names, counts))


def trtllm_side(model: ModelConfig, replicas: int, tp: int, moe_ep: int, head: bool, dtype: torch.dtype = F32, first: int = 0) -> Side:
    ranks = tuple(tuple(range(first + r * tp, first + (r + 1) * tp)) for r in range(replicas))
    party = trtllm_party(model, ranks, dtype, moe_ep, head)
    return Side(f"trtllm {replicas} x tp {tp} moe_ep {moe_ep} head {head}", party, tuple(party.layout(r) for r in party.ranks),
                lambda full, rank: cast(trtllm_shard(full, model, tp, (rank - first) % tp, moe_ep, head), dtype))


def engine_side(model: ModelConfig, tp: int, pp: int, moe_ep: int, whole: bool, dtype: torch.dtype = F32) -> Side:
    layouts = tuple(trtllm_engine_layout(model, tp, pp, r, dtype, moe_ep=moe_ep, parallel_embedding=not whole) for r in range(tp * pp))
    return Side(f"trtllm_engine tp {tp} pp {pp} moe_ep {moe_ep}", list(layouts), layouts,
                lambda full, rank: engine_shard(full, model, tp, pp, rank, dtype, moe_ep=moe_ep, parallel_embedding=not whole))


@st.composite
def models(draw: st.DrawFn, families: Sequence[str] = tuple(FAMILIES)) -> ModelConfig:
    family = draw(st.sampled_from(families))
    changes: dict[str, Any] = dict(tied=draw(st.booleans()), vocab_size=draw(st.integers(1, 20)), num_layers=draw(st.sampled_from([2, 4])),
                                   make_vocab_size_divisible_by=draw(st.sampled_from([1, 2, 8])))
    if not family.startswith("deepseek"):
        changes.update(num_kv_heads=draw(st.sampled_from([1, 2, 4])), head_dim=4)
    layers = None
    if family in MOE_FAMILIES and family not in ("mixtral", "gpt_oss") and draw(st.booleans()):
        layers = sorted(draw(st.sets(st.integers(0, changes["num_layers"] - 1), min_size=1)))
    return tiny(family, layers, **changes)


@st.composite
def stages(draw: st.DrawFn, layers: int) -> tuple[dict[str, Any], list[int]]:
    """A division of the layers into stages, in Megatron's three ways of saying it, and the layers of each stage."""
    pp, vpp = draw(st.sampled_from([(1, None), (2, None), (2, 2), (4, None)]))
    count = pp * (vpp or 1)
    if pp > 1 and draw(st.booleans()):  # a layout string with any counts
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=count - 1, max_size=count - 1)))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, layers])]
        text = "|".join("t" * n for n in counts)
        return dict(pp=pp, vpp=vpp, pipeline_layout=f"E{text}L"), counts
    if pp == 2 and vpp is None and draw(st.booleans()):
        first = draw(st.integers(1, layers - 1))
        key, size = draw(st.sampled_from([("first_stage_layers", first), ("last_stage_layers", layers - first)]))
        return {"pp": pp, key: size}, [first, layers - first]
    if layers % count:
        pp, vpp, count = 1, None, 1
    return dict(pp=pp, vpp=vpp), [layers // count] * count


@st.composite
def mcore_sides(draw: st.DrawFn, model: ModelConfig, first: int = 0) -> Side:
    split, counts = draw(stages(model.num_layers))
    tp, ep, etp = draw(st.sampled_from([1, 2, 4])), 1, None
    if model.moe:
        ep, etp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([None, 1, 2]))
    par = ParallelConfig(tp=tp, ep=ep, etp=etp, **split)
    per_stage = math.lcm(tp, par.expert_tp * ep) if model.moe else tp
    dp = 2 if per_stage * par.pp <= 4 and draw(st.booleans()) else 1
    return mcore_side(model, par, per_stage * par.pp * dp, draw(st.sampled_from(["local", "te"])), counts, first)


@st.composite
def sides(draw: st.DrawFn, model: ModelConfig, first: int = 0) -> Side:
    kinds = ["hf", "mcore", "mcore", "trtllm", "trtllm"]
    if model.family in ENGINE_FAMILIES and (model.moe is None or len(model.moe.layers) == model.num_layers):
        kinds.append("trtllm_engine")
    kind = draw(st.sampled_from(kinds))
    if kind == "hf":
        return hf_side(model, draw(st.sampled_from(["split", "fused", "transposed"])))
    if kind == "mcore":
        return draw(mcore_sides(model, first))
    tp = draw(st.sampled_from([1, 2, 4]))
    moe_ep = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0])) if model.moe else 1
    if kind == "trtllm":
        return trtllm_side(model, draw(st.sampled_from([1, 2])), tp, moe_ep, draw(st.booleans()), first=first)
    return engine_side(model, tp, draw(st.sampled_from([1, 2])), moe_ep, draw(st.booleans()))


def blocks(model: ModelConfig, source: Side, destination: Side) -> Any:
    """Parties number their canonical tensors by block; lists of layouts also take them in one mapping."""
    return canonical_blocks(model) if not isinstance(source.party, list) or not isinstance(destination.party, list) else canonical_shapes(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_through_every_kind_of_layout(family: str) -> None:
    """The same moves for each, so that none depends on what is drawn below: two TP sizes, both spellings of Megatron's names, EP x ETP."""
    model = tiny(family, tied=family in ("qwen2", "mistral"))
    moe = model.moe is not None
    full = canonical_tensors(model)
    chain = [hf_side(model, "split"), mcore_side(model, ParallelConfig(tp=2, pp=2, ep=2 if moe else 1, etp=1 if moe else None), 4, "te"),
             mcore_side(model, ParallelConfig(tp=4, pp=2, vpp=2, ep=2 if moe else 1, etp=2 if moe else None), 8, "local"),
             trtllm_side(model, 2, 4, 2 if moe else 1, True), mcore_side(model, ParallelConfig(tp=4), 4, "te"), hf_side(model, "fused")]
    if family in ENGINE_FAMILIES:
        chain += [engine_side(model, 4, 2, 2 if moe else 1, True)]
    for source, destination in zip(chain, [*chain[1:], hf_side(model, "transposed")], strict=True):
        arrived = destination.empty()
        simulate(make_plan(source.party, destination.party, blocks(model, source, destination)), source.held(full), arrived)
        for rank, expected in destination.held(full).items():
            assert_same(arrived[rank], expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_layout_to_any_other_equals_direct_construction(data: st.DataObject) -> None:
    """HF -> first -> second -> HF: each is the directly built one, the last is where it began, and all have one checksum."""
    model = data.draw(models())
    full = canonical_tensors(model)
    assert canonical_shapes(model) == {name: tuple(t.shape) for name, t in full.items()}
    files = [hf_side(model, data.draw(st.sampled_from(["split", "fused", "transposed"]))) for _ in range(2)]
    chain = [files[0], data.draw(sides(model)), data.draw(sides(model)), files[1]]
    held = chain[0].held(full)
    checksum = verify(chain[0].layouts, [piece_checksums(x, held[x.rank]) for x in chain[0].layouts])
    assert set(checksum) == set(full)
    for source, destination in zip(chain, chain[1:]):
        arrived = destination.empty()
        simulate(make_plan(source.party, destination.party, blocks(model, source, destination)), held, arrived)
        for rank, expected in destination.held(full).items():
            assert_same(arrived[rank], expected)
        if destination is not chain[-1]:
            verify(destination.layouts, [piece_checksums(x, arrived[x.rank]) for x in destination.layouts], checksum)
        held = arrived


@pytest.mark.parametrize("small", [0, 16, 1 << 13])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_added_up_together_are_the_sums_of_single_pieces(small: int, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """By whole rows, element by element, or each by itself: `small` decides which pieces take which way."""
    monkeypatch.setattr(piece_sums, "SMALL", small)
    dtype = data.draw(st.sampled_from([F32, torch.bfloat16, torch.float8_e4m3fn]))
    side = data.draw(sides(data.draw(models())))
    for layout in side.layouts[:3]:
        held = cast({name: torch.randn(t.shape) for name, t in empty_tensors(layout).items()}, dtype)
        single = [region_checksum(piece.of(held[local.name]), piece.region, dtype) if piece.canonical else torch.tensor(0)
                  for local in layout.tensors for piece in local.pieces]
        sums = PieceSums(layout, dtype)
        assert sums(held) == [int(value) % 2 ** 64 for value in single]
        for local, piece in [(local, piece) for local in layout.tensors for piece in local.pieces if piece.canonical and volume(piece.region)][:1]:
            piece.of(held[local.name]).fill_(3.25)
            assert sums(held) == piece_checksums(layout, held, dtype) != [int(value) % 2 ** 64 for value in single], "nothing of the values is kept"


def seen_by(plan: Plan, rank: int) -> tuple[Counter, Counter]:
    return (Counter(c for c in plan.copies if rank in (c.src_rank, c.dst_rank)), Counter(p for p in plan.paddings if p.rank == rank))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_plans_of_single_ranks_are_the_parts_of_the_plan_of_all(data: st.DataObject) -> None:
    """Each copy is seen by exactly its sender and its receiver, each padding by its rank, in the order of the whole plan."""
    model = data.draw(models())
    source = data.draw(mcore_sides(model))
    first = data.draw(st.sampled_from([0, 1, len(source.layouts)]))  # the same ranks, some of them, or others
    destination = data.draw(st.one_of(mcore_sides(model, first), sides(model, first)))
    if not hasattr(destination.party, "ranks"):
        destination = trtllm_side(model, 1, 2, 1, False, first=first)
    plan = make_plan(source.party, destination.party, canonical_blocks(model))
    assert [c.order for c in plan.copies] == sorted(c.order for c in plan.copies)
    ranks = sorted({*source.party.ranks, *destination.party.ranks})
    copies: Counter = Counter()
    paddings: Counter = Counter()
    for rank in ranks:
        mine = make_plan(source.party, destination.party, canonical_blocks(model), rank=rank)
        assert seen_by(plan, rank) == (Counter(mine.copies), Counter(mine.paddings))
        position = {copy: i for i, copy in enumerate(plan.copies)}
        assert [position[c] for c in mine.copies] == sorted(position[c] for c in mine.copies)
        copies.update(mine.copies)
        paddings.update(mine.paddings)
        assert (mine.bytes_received[rank], mine.bytes_sent[rank]) == (plan.bytes_received[rank], plan.bytes_sent[rank])
        assert mine.bytes_written == sum(c.nbytes for c in plan.copies if c.dst_rank == rank)
    assert copies == Counter({c: (1 if c.src_rank == c.dst_rank else 2) for c in plan.copies})
    assert paddings == Counter(plan.paddings)


def test_a_plan_of_parties_is_the_plan_of_their_layouts() -> None:
    """Described block by block or rank by rank, the same bytes arrive, and as many travel."""
    for family in FAMILIES:
        model = tiny(family, tied=family in ("qwen2", "mixtral"))
        par = ParallelConfig(tp=2, pp=2, ep=2 if model.moe else 1, etp=1 if model.moe else None)
        source, destination = mcore_side(model, par, 8, "te"), trtllm_side(model, 2, 4, 2 if model.moe else 1, False)
        one = make_plan(source.party, destination.party, canonical_blocks(model))
        other = make_plan(source.layouts, destination.layouts, canonical_shapes(model))

        def arriving(plan: Plan) -> dict[tuple[int, str], set]:
            out = defaultdict(set)
            for c in plan.copies:
                out[c.dst_rank, c.dst_tensor].add((c.dst_box, c.canonical, c.region))
            return out

        assert arriving(one) == arriving(other) and Counter(one.paddings) == Counter(other.paddings)
        assert one.bytes_moved == other.bytes_moved


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_destination_in_another_dtype_holds_the_cast_values(data: st.DataObject) -> None:
    """All but what is kept in float32: the router's correction bias, and the classic engine's router."""
    model = data.draw(models())
    full = canonical_tensors(model)
    source = data.draw(mcore_sides(model))
    options = [hf_side(model, "fused", torch.bfloat16), trtllm_side(model, 1, 2, 1, True, torch.bfloat16)]
    if model.family in ENGINE_FAMILIES and (model.moe is None or len(model.moe.layers) == model.num_layers):
        options.append(engine_side(model, 2, 1, 1, True, torch.bfloat16))
    destination = data.draw(st.sampled_from(options))
    arrived = destination.empty()
    simulate(make_plan(source.party, destination.party, blocks(model, source, destination)), source.held(full), arrived)
    for rank, expected in destination.held(full).items():
        assert_same(arrived[rank], expected)


FAULTS = {"source": ("lost", "doubled", "moved", "misread", "renamed"), "destination": ("lost", "doubled", "moved", "renamed")}


def refusal(ends: dict[str, list[Layout]], model: ModelConfig, rank: int | None) -> str:
    try:
        make_plan(ends["source"], ends["destination"], canonical_shapes(model), rank=rank)
    except CoverageError as error:
        return str(error)
    return ""


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_piece_that_is_lost_doubled_moved_misread_or_renamed_is_refused_by_name(data: st.DataObject) -> None:
    model = data.draw(models())
    parties = {"source": data.draw(mcore_sides(model)), "destination": data.draw(sides(model))}
    ends = {end: [layout for layout in side.layouts if layout.tensors] for end, side in parties.items()}  # a stage may be empty
    end = data.draw(st.sampled_from(["source", "destination"]))
    k = data.draw(st.integers(0, len(ends[end]) - 1))
    layout = ends[end][k]
    n = data.draw(st.integers(0, len(layout.tensors) - 1))
    tensor = layout.tensors[n]
    j = data.draw(st.integers(0, len(tensor.pieces) - 1))
    piece = tensor.pieces[j]
    fault = data.draw(st.sampled_from(FAULTS[end]))
    if fault == "misread" and piece.canonical is None:
        fault = "lost"
    low, high = piece.region[0]
    changed = {"lost": (), "doubled": (piece, piece), "moved": (replace(piece, offset=(piece.offset[0] + 1, *piece.offset[1:])),),
               "misread": (replace(piece, region=((low + 1, high + 1), *piece.region[1:])),),
               "renamed": (replace(piece, canonical="model.layers.0.self_attn.qproj.weight"),)}[fault]
    broken = replace(tensor, pieces=(*tensor.pieces[:j], *changed, *tensor.pieces[j + 1:]))
    ends[end][k] = replace(layout, tensors=(*layout.tensors[:n], broken, *layout.tensors[n + 1:]))
    whole = refusal(ends, model, None)
    alone = [refusal(ends, model, rank) for rank in sorted({x.rank for layouts in ends.values() for x in layouts})]
    for text in (whole, "; ".join(alone)):  # ranks that plan for themselves: one of them at least sees it, and tells the others
        assert tensor.name in text or (piece.canonical or tensor.name) in text, (fault, end, text)
