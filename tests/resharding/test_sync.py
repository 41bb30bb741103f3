"""Real moves between ranks: every party, bounded buckets, and all or nothing when a rank fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.model_config import ModelConfig
from resharding.checksum import verify
from resharding.errors import CoverageError, SyncError, WeightsError
from resharding.fp8 import quantise
from resharding.layout import Layout, canonical_blocks, canonical_shapes, empty_tensors
from resharding.layouts import mcore_layout, mcore_party, trtllm_layout, trtllm_party
from resharding.layouts.fp8 import fp8_blocks, fp8_party, fp8_weights, scaled_party
from resharding.piece_sums import piece_checksums
from resharding.plan import make_plan
from resharding.sync import WeightSync
from resharding.transform import Fp8Source
from resharding.transport import execute
from tests.resharding.direct import Tensors, assert_same, canonical_tensors, mcore_shard, tiny, trtllm_shard
from tests.worker_pool import run_ranks


class RecordingEngine:
    """Weights, and the rule that it generates only when a version is committed."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors, self.version, self.fail_at_commit, self.fail_at_verify = tensors, None, False, False
        self.checksums: dict[str, int] = {}

    def begin_update(self) -> None:
        self.version = None

    def weights(self) -> Tensors:
        return self.tensors

    def commit(self, version: int, checksums: Mapping[str, int]) -> None:
        if self.fail_at_commit:
            raise WeightsError("model.norm.weight: injected")
        self.version, self.checksums = version, dict(checksums)

    def verify(self) -> None:
        if self.fail_at_verify:
            raise WeightsError("model.norm.weight: injected")


class FailingTensors(Mapping[str, torch.Tensor]):
    """Source tensors of which one breaks at one read: 1 is the check before the move, then own copies, messages, checksum."""

    def __init__(self, tensors: Tensors, name: str, at: int) -> None:
        self.tensors, self.name, self.at, self.reads = tensors, name, at, 0

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.name:
            self.reads += 1
            if self.reads == self.at:
                raise RuntimeError("injected: memory is gone")
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def parties(model: ModelConfig, parallel: ParallelConfig, engine_tp: int, dtype: torch.dtype = torch.float32) -> tuple[list, list]:
    world = dist.get_world_size()
    trainer = [mcore_layout(model, parallel, r, world, torch.float32) for r in range(world)]
    return trainer, [trtllm_layout(model, engine_tp, r % engine_tp, r, dtype) for r in range(world)]  # world / engine_tp engines


def move(model: ModelConfig, parallel: ParallelConfig, engine_tp: int, dtype: torch.dtype, transport: str) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer, engines = parties(model, parallel, engine_tp, dtype)
    plan = make_plan(trainer, engines, canonical_shapes(model), rank=rank)
    full = canonical_tensors(model)
    destination = {n: t.fill_(float("nan")) for n, t in empty_tensors(engines[rank]).items()}
    report = execute(plan, mcore_shard(full, model, parallel, rank, world), destination, rank, transport=transport)
    expected = trtllm_shard({n: t.to(dtype) for n, t in full.items()}, model, engine_tp, rank % engine_tp)
    assert_same(destination, expected)
    return report.bytes


@pytest.mark.parametrize("world, parallel, engine_tp", [
    (2, ParallelConfig(tp=2), 1),           # two replicas of a whole engine
    (2, ParallelConfig(pp=2), 2),
    (2, ParallelConfig(tp=2), 2),
    (2, ParallelConfig(), 2),               # data parallel: nothing travels
    (4, ParallelConfig(tp=4), 2),
    (4, ParallelConfig(tp=2, pp=2), 4),     # more engine ranks than key/value heads
    (4, ParallelConfig(pp=2, vpp=2), 2),
])
@pytest.mark.parametrize("transport", ["auto", "point_to_point"])
def test_shards_arrive_bit_for_bit(world: int, parallel: ParallelConfig, engine_tp: int, transport: str) -> None:
    for tied in (False, True):
        model = tiny("qwen2", tied=tied)
        run_ranks(world, move, model, parallel, engine_tp, torch.float32, transport)


def sync_thrice(model: ModelConfig, parallel: ParallelConfig, engine_tp: int, fault: str) -> dict[str, Any]:
    """Sync version 1, version 2 with a fault on the last rank, version 3 without."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer, engines = parties(model, parallel, engine_tp, torch.bfloat16)
    sync = WeightSync(trainer, engines, canonical_shapes(model), rank)
    engine = RecordingEngine(empty_tensors(engines[rank]))
    seen: dict[str, Any] = {}
    for version in (1, 2, 3):
        full = canonical_tensors(model, seed=version)
        source: Mapping[str, torch.Tensor] = {n: t.clone() for n, t in mcore_shard(full, model, parallel, rank, world).items()}
        broken = version == 2 and rank == world - 1
        if broken and fault.startswith("read"):
            source = FailingTensors(dict(source), "decoder.layers.0.mlp.linear_fc2.weight", int(fault.split()[1]))
        elif broken and fault == "missing":
            source = {n: t for n, t in source.items() if n != "decoder.layers.0.mlp.linear_fc2.weight"}
        elif broken and fault == "replica":
            source["output_layer.weight" if model.tied else "decoder.final_layernorm.weight"][0] += 1.0
        engine.fail_at_commit, engine.fail_at_verify = broken and fault == "commit", broken and fault == "verify"
        try:
            report = sync.run(source, engine, version)
            seen[f"bytes {version}"] = report.bytes
        except (SyncError, WeightsError) as error:
            seen[f"error {version}"] = (type(error).__name__, str(error))
        seen[f"version {version}"] = engine.version
        if engine.version is not None:
            assert_same(engine.tensors, trtllm_shard({n: t.bfloat16() for n, t in full.items()}, model, engine_tp, rank % engine_tp))
    values: list[Any] = [None] * world
    dist.all_gather_object(values, piece_checksums(engines[rank], engine.tensors))
    assert verify(engines, values, engine.checksums) == engine.checksums
    return seen


@pytest.mark.parametrize("fault, kind, message", [
    ("read 1", "SyncError", "memory is gone"),
    ("read 2", "SyncError", "memory is gone"),
    ("read 3", "SyncError", "memory is gone"),
    ("missing", "WeightsError", "lack decoder.layers.0.mlp.linear_fc2.weight"),
    ("commit", "WeightsError", "model.norm.weight: injected"),
    ("verify", "WeightsError", "model.norm.weight: injected"),
    ("replica", "WeightsError", "model.norm.weight: the copies in decoder.final_layernorm.weight on rank 0 and in"),
])
@pytest.mark.parametrize("world, parallel, engine_tp", [(2, ParallelConfig(tp=2), 1), (4, ParallelConfig(tp=2), 2)])
def test_a_rank_that_fails_leaves_nobody_committed_and_the_next_sync_recovers(
        fault: str, kind: str, message: str, world: int, parallel: ParallelConfig, engine_tp: int) -> None:
    results = run_ranks(world, sync_thrice, tiny("qwen2", num_layers=2), parallel, engine_tp, fault)
    for seen in results:
        assert (seen["version 1"], seen["version 2"], seen["version 3"]) == (1, None, 3)
        assert seen["error 2"][0] == kind and message in seen["error 2"][1]
        assert seen["bytes 1"] == seen["bytes 3"] > 0


def test_a_sync_refuses_tied_copies_that_have_drifted_apart() -> None:
    for seen in run_ranks(2, sync_thrice, tiny("qwen2", num_layers=2, tied=True), ParallelConfig(pp=2), 2, "replica"):
        assert seen["version 2"] is None
        assert "model.embed_tokens.weight" in seen["error 2"][1] and "output_layer.weight" in seen["error 2"][1]
        assert seen["version 3"] == 3


def separate_parties(model: ModelConfig) -> int | None:
    """Trainer on ranks 0 and 1, engine on ranks 2 and 3."""
    rank = dist.get_rank()
    parallel = ParallelConfig(tp=2)
    trainer = [mcore_layout(model, parallel, r, 2, torch.float32) for r in (0, 1)]
    engines = [trtllm_layout(model, 2, t, 2 + t, torch.float32) for t in (0, 1)]
    sync = WeightSync(trainer, engines, canonical_shapes(model), rank)
    full = canonical_tensors(model)
    if rank < 2:
        sync.run(mcore_shard(full, model, parallel, rank, 2), None, 1)
        return None
    engine = RecordingEngine(empty_tensors(engines[rank - 2]))
    sync.run({}, engine, 1)
    assert_same(engine.tensors, trtllm_shard(full, model, 2, rank - 2))
    return engine.version


def test_trainer_and_engine_may_live_on_different_ranks() -> None:
    assert run_ranks(4, separate_parties, tiny()) == [None, None, 1, 1]


def test_a_sync_in_one_process_needs_no_process_group() -> None:
    model = tiny()
    trainer, engine_layout = mcore_layout(model, ParallelConfig(), 0, 1, torch.float32), trtllm_layout(model, 1, 0, 0, torch.float32)
    engine = RecordingEngine(empty_tensors(engine_layout))
    full = canonical_tensors(model)
    sync = WeightSync([trainer], [engine_layout], canonical_shapes(model))
    report = sync.run(mcore_shard(full, model, ParallelConfig(), 0, 1), engine, 7)
    assert engine.version == report.version == 7
    assert_same(engine.tensors, trtllm_shard(full, model, 1, 0))


def sync_in_fp8(block: tuple[int, int]) -> tuple[Tensors, dict[str, int], int | None]:
    rank, model = dist.get_rank(), tiny("qwen3", hidden_size=16, intermediate_size=36, head_dim=8)  # tp 2 cuts blocks of the feed-forward
    blocks, weights, parallel = canonical_blocks(model), fp8_weights(model), ParallelConfig(tp=2)
    trainer = scaled_party(mcore_party(model, parallel, 2, torch.bfloat16), weights, len(blocks), block)
    engines = fp8_party(trtllm_party(model, ((0,), (1,)), torch.bfloat16), weights, len(blocks), block)
    engine = RecordingEngine(empty_tensors(engines.layout(rank)))
    sync = WeightSync(trainer, engines, fp8_blocks(blocks, weights, block), rank, transform=Fp8Source(trainer, rank))
    for version in (1, 2):
        sync.run(mcore_shard(canonical_tensors(model, torch.bfloat16, version), model, parallel, rank, 2), engine, version)
    found = verify([engines.layout(rank)], [piece_checksums(engines.layout(rank), engine.tensors)], engine.checksums)
    return engine.tensors, found, engine.version


def test_an_fp8_engine_is_synced_to_the_quantised_weights_and_checked() -> None:
    model = tiny("qwen3", hidden_size=16, intermediate_size=36, head_dim=8)
    whole = trtllm_shard(canonical_tensors(model, torch.bfloat16, 2), model, 1, 0)
    for tensors, sums, version in run_ranks(2, sync_in_fp8, (4, 4)):
        assert version == 2 and "model.layers.0.mlp.down_proj.weight_scale_inv" in sums
        for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
            codes, scales = quantise(whole[name], (4, 4))
            assert torch.equal(tensors[name].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(tensors[name + "_scale_inv"], scales)
        assert torch.equal(tensors["model.embed_tokens.weight"], whole["model.embed_tokens.weight"]), "what is not quantised arrives as it is"


def sync_of_infinite_weights() -> tuple[str, int | None]:
    """The second version holds an infinity, which has no scale; found by all ranks at once, before anything moves."""
    rank, model = dist.get_rank(), tiny("qwen3", hidden_size=16, intermediate_size=32, head_dim=8)
    blocks, weights, parallel = canonical_blocks(model), fp8_weights(model), ParallelConfig()
    trainer = scaled_party(mcore_party(model, parallel, 2, torch.bfloat16), weights, len(blocks), (8, 8))
    engines = fp8_party(trtllm_party(model, ((0,), (1,)), torch.bfloat16), weights, len(blocks), (8, 8))
    engine = RecordingEngine(empty_tensors(engines.layout(rank)))
    sync = WeightSync(trainer, engines, fp8_blocks(blocks, weights, (8, 8)), rank, transform=Fp8Source(trainer, rank))
    held = mcore_shard(canonical_tensors(model, torch.bfloat16), model, parallel, rank, 2)
    sync.run(held, engine, 1)
    held["decoder.layers.0.mlp.linear_fc2.weight"][0, 0] = float("inf")
    try:
        sync.run(held, engine, 2)
    except WeightsError as error:
        return str(error), engine.version
    return "", engine.version


def test_an_engine_does_not_go_on_with_the_old_version_where_the_new_one_cannot_be_made() -> None:
    for message, version in run_ranks(2, sync_of_infinite_weights):
        assert "model.layers.0.mlp.down_proj.weight" in message and version is None


def sync_that_does_not_cover() -> str:
    model, rank = tiny(num_layers=2), dist.get_rank()
    short = [Layout("mcore", r, mcore_layout(model, ParallelConfig(), r, 2, torch.float32).tensors[:-1]) for r in (0, 1)]
    try:
        WeightSync(short, [trtllm_layout(model, 1, 0, r, torch.float32) for r in (0, 1)], canonical_shapes(model), rank)
    except CoverageError as error:
        return str(error)
    return ""


def test_layouts_that_do_not_cover_the_model_are_refused_by_name_on_every_rank() -> None:
    for message in run_ranks(2, sync_that_does_not_cover):
        assert "lm_head.weight" in message
