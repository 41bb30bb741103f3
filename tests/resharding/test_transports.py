"""Every transport moves the same bytes, in bounded memory, and neither waits for ever nor goes on silently where something breaks."""

from __future__ import annotations

import inspect
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import WeightsError
from resharding.layout import canonical_shapes, empty_tensors
from resharding.layouts import mcore_layout, trtllm_layout
from resharding.plan import Copy, Plan, make_plan
from resharding.sync import WeightSync
from resharding.transform import Cast
from resharding.transport import choose, cuda_ipc, execute, process_memory, same_host, shared_memory
from resharding.transport.buckets import SharedBytes, open_bytes
from resharding.transport.messages import Message
from resharding.transport.peers import Peers, meet
from tests.resharding.direct import Tensors, assert_same, canonical_tensors, mcore_shard, tiny, trtllm_shard
from tests.resharding.dying import killed_while_it_is_read, ring, run_and_lose, sync_and_lose
from tests.worker_pool import run_ranks
from trtllm_rollout.embedded.engine import EmbeddedEngine

MODEL = tiny("qwen2", num_layers=2)
TP2PP2 = ParallelConfig(tp=2, pp=2)


@contextmanager
def nobody_reads() -> Iterator[None]:
    """As where the kernel lets no process read another's memory: everything goes through mapped buckets."""
    with mock.patch.object(shared_memory, "meet", lambda group: replace(meet(group), reads=frozenset())):
        yield


@contextmanager
def handles_of_host_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """CUDA IPC with a stand-in for the two functions that make and open handles: host memory that lies in memfd."""
    known: dict[int, SharedBytes] = {}
    for name, tensor in tensors.items():
        held = SharedBytes(max(1, tensor.nbytes))
        moved = held.tensor[:tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensors[name] = moved.copy_(tensor)  # type: ignore[index]
        known[moved.untyped_storage().data_ptr()] = held

    def make(storage: torch.UntypedStorage) -> Any:
        held = known.get(storage.data_ptr())
        path = held.path if held else next(b.memory.path for b in buckets if b.memory.tensor.data_ptr() == storage.data_ptr())
        return path, storage.nbytes()

    buckets: list[Any] = []
    original = same_host.buckets_of
    with mock.patch.object(cuda_ipc, "make_handle", make), mock.patch.object(cuda_ipc, "open_handle", lambda h: open_bytes(*h)), \
            mock.patch.object(same_host, "buckets_of", lambda plan, device: buckets.append(original(plan, device)) or buckets[-1]):
        yield


def run_ipc(plan: Plan, source: Tensors, destination: Tensors, rank: int, bucket_bytes: int) -> Any:
    memory = cuda_ipc.CudaIpc(torch.device("cpu"))
    return same_host.run(memory, None, plan, source, destination, rank, bucket_bytes, choose.CAST, None)


def every_way(model: ModelConfig, parallel: ParallelConfig, trains: int, engine_tp: int, engine_ranks: tuple[int, ...]) -> dict[str, int]:
    """The same move by every transport and bucket, into fresh tensors, twice each; from float32 and from the engine's bfloat16."""
    rank, world = dist.get_rank(), trains
    full = canonical_tensors(model)
    engines = [trtllm_layout(model, engine_tp, i % engine_tp, r, torch.bfloat16) for i, r in enumerate(engine_ranks)]
    mine = next((layout for layout in engines if layout.rank == rank), None)
    expected = trtllm_shard({n: t.bfloat16() for n, t in full.items()}, model, engine_tp, engine_ranks.index(rank) % engine_tp) if mine else {}
    out: dict[str, int] = {}

    def check(name: str, dtype: torch.dtype, move: Any, again: bool) -> None:
        trainer = [mcore_layout(model, parallel, r, world, dtype) for r in range(world)]
        plan = make_plan(trainer, engines, canonical_shapes(model), rank=rank)
        source = {n: t.to(dtype, copy=True) for n, t in mcore_shard(full, model, parallel, rank, world).items()} if rank < world else {}
        destination = {n: t.fill_(float("nan")) for n, t in empty_tensors(mine).items()} if mine else {}
        out[name] = move(plan, source, destination).bytes
        assert_same(destination, expected)
        if again:
            for tensor in source.values():
                tensor.mul_(2)  # other values in the same memory, and then those in other memory, on both sides
            move(plan, source, destination)
            assert_same(destination, {n: t * 2 for n, t in expected.items()})
            destination = {n: t.fill_(float("nan")) for n, t in empty_tensors(mine).items()} if mine else {}
            move(plan, {n: t.clone() for n, t in source.items()}, destination)
            assert_same(destination, {n: t * 2 for n, t in expected.items()})

    for dtype in (torch.float32, torch.bfloat16):
        for name, bucket in (("auto", 64), ("auto", 1 << 20), ("point_to_point", 64), ("point_to_point", 1000), ("shared_memory", 512)):
            check(f"{name} {bucket} {dtype}", dtype, lambda p, s, d: execute(p, s, d, rank, None, bucket, transport=name), bucket > 64)
        with nobody_reads():
            check(f"mapped {dtype}", dtype, lambda p, s, d: shared_memory.execute(p, s, d, rank, bucket_bytes=512), True)

        def by_handles(plan: Plan, source: Tensors, destination: Tensors) -> Any:
            held = dict(source)
            with handles_of_host_memory(held):
                return run_ipc(plan, held, destination, rank, 512)

        check(f"handles {dtype}", dtype, by_handles, True)
    return out


@pytest.mark.parametrize("world, parallel, trains, engine_tp, engine_ranks", [
    (4, TP2PP2, 4, 2, (0, 1)),
    (4, TP2PP2, 4, 2, (2, 3, 0, 1)),                # two replicas, and not in the order of the trainer's ranks
    (2, ParallelConfig(tp=2), 2, 1, (0,)),
    (4, ParallelConfig(tp=2), 2, 2, (2, 3)),        # trainer and engine share no rank
    (3, ParallelConfig(), 1, 1, (1, 2)),
])
def test_every_transport_and_bucket_gives_the_same_bytes(
        world: int, parallel: ParallelConfig, trains: int, engine_tp: int, engine_ranks: tuple[int, ...]) -> None:
    results = run_ranks(world, every_way, MODEL, parallel, trains, engine_tp, engine_ranks)
    rows = -(-MODEL.vocab_size // engine_tp) * engine_tp - MODEL.vocab_size  # padding rows of the embedding and of the head
    needed = sum(t.nbytes for i in range(len(engine_ranks)) for t in trtllm_shard(
        canonical_tensors(MODEL, torch.bfloat16), MODEL, engine_tp, i % engine_tp).values())
    needed -= 2 * rows * MODEL.hidden_size * 2 * (len(engine_ranks) // engine_tp)
    totals = {name: sum(result[name] for result in results) for name in results[0]}
    assert len(totals) == 14 and set(totals.values()) == {needed}


def ways(transport: str) -> dict[str, int]:
    rank = dist.get_rank()
    trainer = [mcore_layout(MODEL, ParallelConfig(tp=2), r, 2, torch.float32) for r in range(2)]
    engines = [trtllm_layout(MODEL, 1, 0, 0, torch.float32)]
    destination = empty_tensors(engines[0]) if rank == 0 else {}
    source = mcore_shard(canonical_tensors(MODEL), MODEL, ParallelConfig(tp=2), rank, 2) if rank < 2 else {}
    plan = make_plan(trainer, engines, canonical_shapes(MODEL), rank=rank)
    return dict(execute(plan, source, destination, rank, transport=transport).by_transport)


def test_one_host_shares_memory_and_a_rank_copies_its_own_in_place() -> None:
    """The third rank has nothing to exchange."""
    for transport in ("auto", "shared_memory", "point_to_point"):
        first, *others = run_ranks(3, ways, transport)
        assert set(first) == {"in_place", "shared_memory" if transport == "auto" else transport} and others == [{}, {}]
    copy = Copy(0, "a", ((0, 1),), 1, "b", ((0, 1),), "c", torch.float32, ((0, 1),))
    with pytest.raises(WeightsError, match="c must travel from rank 0 to rank 1: use a transport between ranks"):
        execute(Plan((copy,), ()), {}, {}, 0)  # no process group: there is no other rank


def test_who_is_served_by_what() -> None:
    peers = Peers(maps=frozenset({(1, 0)}), reads=frozenset(), sees=frozenset({(1, 0)}), control=None)
    devices = {0: ("cpu", "cpu"), 1: ("cpu", "cpu"), 2: ("cuda", "cuda"), 3: ("cuda", "cuda")}
    assert choose._way(0, 1, devices, peers) == "shared_memory"
    assert choose._way(1, 0, devices, peers) == "point_to_point"  # rank 0 cannot map rank 1's memory
    on_gpus = {0: ("cuda", "cpu"), 1: ("cpu", "cuda")}
    assert choose._way(0, 1, on_gpus, peers) == "cuda_ipc"
    assert choose._way(0, 1, {0: ("cuda", "cuda"), 1: ("cuda", "cpu")}, peers) == "point_to_point"
    with pytest.raises(UserError, match="transport is 'ipc'; allowed: auto, point_to_point, shared_memory, cuda_ipc"):
        execute(Plan((), ()), {}, {}, transport="ipc")


def test_a_handle_is_opened_on_the_gpu_it_names() -> None:
    arguments = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert arguments[cuda_ipc.DEVICE_ARGUMENT] == "storage_device"
    made = [f"argument {i}" for i in range(len(arguments))]
    names = {0: mock.Mock(uuid="GPU-b"), 1: mock.Mock(uuid="GPU-a")}
    with mock.patch("torch.cuda.device_count", lambda: 2), mock.patch("torch.cuda.get_device_properties", names.__getitem__), \
            mock.patch("torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda *a: a):
        opened = cuda_ipc.open_handle((tuple(made), "GPU-a"))
    assert opened[cuda_ipc.DEVICE_ARGUMENT] == 1 and [*opened[:6], *opened[7:]] == [*made[:6], *made[7:]]


def tangle(seed: int, bucket: int, transport: str) -> None:
    """Copies between all pairs of ranks in a random order: who waits for whom has every cycle there is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    draw, copies = random.Random(seed), []
    for order in range(80):
        (src, dst), size = draw.sample(range(world), 2), draw.choice((1, 7, 100, 3000))
        copies.append(Copy(src, f"t{order}", ((0, size),), dst, f"t{order}", ((0, size),), f"t{order}", torch.float64, ((0, size),), order))
    mine = [c for c in copies if rank in (c.src_rank, c.dst_rank)]
    value = torch.arange(3000, dtype=torch.float64)
    source = {c.src_tensor: (value[:c.dst_box[0][1]] + c.order).float() for c in mine if c.src_rank == rank}  # a cast: all are packed
    destination = {c.dst_tensor: torch.zeros(c.dst_box[0][1], dtype=torch.float64) for c in mine if c.dst_rank == rank}
    execute(Plan(tuple(mine), (), rank), source, destination, rank, None, bucket, transport=transport)
    for copy in mine:
        if copy.dst_rank == rank:
            assert torch.equal(destination[copy.dst_tensor], value[:copy.dst_box[0][1]] + copy.order)


@pytest.mark.parametrize("transport", ["point_to_point", "shared_memory"])
def test_ranks_that_all_wait_for_each_other_finish(transport: str) -> None:
    for seed, bucket in ((0, 1 << 20), (1, 800), (2, 4000)):
        run_ranks(4, tangle, seed, bucket, transport, timeout=60)


class Negated(Cast):
    """Computes what it reads, as quantisation does, and remembers the most that it was asked for at once."""

    most = 0

    def read(self, copy: Copy, source: Mapping[str, Any]) -> torch.Tensor:
        self.most = max(self.most, copy.nbytes)
        return -super().read(copy, source)


def negate(transport: str) -> tuple[int, int]:
    """Every rank sends 6 MB to itself and to the other, cut in columns on the way."""
    rank, box = dist.get_rank(), ((0, 1500), (0, 1000))
    copies = [Copy(src, "s", ((0, 1500), (100, 1100)), dst, f"from {src}", box, "c", torch.float32, box, src * 2 + dst)
              for src in range(2) for dst in range(2) if rank in (src, dst)]
    source = {"s": torch.arange(1500 * 1200.0, dtype=torch.float64).view(1500, 1200) + rank}
    destination = {f"from {src}": torch.zeros(1500, 1000) for src in range(2)}
    transform = Negated()
    moved = execute(Plan(tuple(copies), (), rank), source, destination, rank, None, 2 << 20, transform, transport=transport).bytes
    for src in range(2):
        assert torch.equal(destination[f"from {src}"], -(torch.arange(1500 * 1200.0).view(1500, 1200) + src)[:, 100:1100])
    return moved, transform.most


@pytest.mark.parametrize("transport", ["auto", "point_to_point"])
def test_what_a_transform_computes_arrives_and_is_computed_in_small_parts(transport: str) -> None:
    for moved, most in run_ranks(2, negate, transport):
        assert moved == 2 * 1500 * 1000 * 4
        assert most <= 1 << 20


def growth(transport: str, bucket: int, dtype: torch.dtype, peers_read: bool) -> int:
    """Bytes by which this rank's memory grows at most while 64 MB reach rank 0 from each of two others, into whole and strided tensors.

    What a receiver maps of others' buckets is theirs, and left out.
    """
    rank, side = dist.get_rank(), 1 << 10
    box = ((0, side), (0, side))
    names = [f"{src} {i}" for src in (1, 2) for i in range(16)]
    copies = [Copy(int(n[0]), n, box, 0, n, box, n, torch.float32, box, i) for i, n in enumerate(names)]
    source = {n: torch.full((side, side), 3.0).to(dtype) for n in names if int(n[0]) == rank}
    destination = {n: (torch.ones(side, side), torch.ones(side, 2 * side)[:, side:], torch.ones(side, 2 * side)[:, ::2])[i % 3]
                   for i, n in enumerate(names)} if rank == 0 else {}
    plan = Plan(tuple(c for c in copies if rank in (c.src_rank, c.dst_rank)), (), rank)
    execute(Plan((), (), rank), {}, {}, rank)  # the ranks meet
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # counts the peak anew
    before, shared = resident("VmRSS"), resident("RssShmem")
    with nobody_reads() if not peers_read else mock.MagicMock():
        execute(plan, source, destination, rank, None, bucket, transport=transport)
    assert all(bool((t == 3).all()) for t in destination.values())
    return resident("VmHWM") - before - (resident("RssShmem") - shared if rank == 0 and transport == "shared_memory" else 0)


def resident(name: str) -> int:
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)).split()[1]) << 10


@pytest.mark.parametrize("transport, dtype, peers_read", [
    ("point_to_point", torch.float32, True), ("point_to_point", torch.bfloat16, True),
    ("shared_memory", torch.float32, True), ("shared_memory", torch.bfloat16, True), ("shared_memory", torch.float32, False)])
def test_memory_grows_by_two_buckets_at_most(transport: str, dtype: torch.dtype, peers_read: bool) -> None:
    bucket = 3 << 20
    grown = run_ranks(3, growth, transport, bucket, dtype, peers_read)
    assert max(grown) <= 2 * bucket, grown


def broken(transport: str) -> dict[str, str]:
    """A source tensor is missing, then misnamed, then whole again."""
    rank = dist.get_rank()
    trainer = [mcore_layout(MODEL, ParallelConfig(tp=2), r, 2, torch.float32) for r in range(2)]
    engines = [trtllm_layout(MODEL, 1, 0, r, torch.bfloat16) for r in range(2)]
    plan = make_plan(trainer, engines, canonical_shapes(MODEL), rank=rank)
    source = mcore_shard(canonical_tensors(MODEL), MODEL, ParallelConfig(tp=2), rank, 2)
    name, seen = "decoder.layers.1.mlp.linear_fc2.weight", {}
    without = {n: t for n, t in source.items() if n != name}
    for fault, tensors in (("missing", without), ("misnamed", {**without, "linear_fc2.weight": source[name]}), ("none", source)):
        destination = empty_tensors(engines[rank])
        try:
            execute(plan, source if rank == 0 else tensors, destination, rank, None, 1000, transport=transport)
        except Exception as error:
            seen[fault] = repr(error)
    assert_same(destination, trtllm_shard({n: t.bfloat16() for n, t in canonical_tensors(MODEL).items()}, MODEL, 1, 0))
    return seen


@pytest.mark.parametrize("transport", ["auto", "point_to_point"])
def test_a_missing_tensor_is_named_and_the_peers_are_not_left_waiting(transport: str) -> None:
    first, second = run_ranks(2, broken, transport, timeout=60)
    assert first == {}
    assert set(second) == {"missing", "misnamed"} and all("decoder.layers.1.mlp.linear_fc2.weight" in text for text in second.values())


def corrupted(transport: str) -> list[Any]:
    """Sync 1 whole, sync 2 with one bit flipped on the way to rank 0, sync 3 whole, twice."""
    rank = dist.get_rank()
    trainer = [mcore_layout(MODEL, ParallelConfig(pp=2), r, 2, torch.bfloat16) for r in range(2)]
    groups = [dist.new_group([r]) for r in range(2)]
    engine = EmbeddedEngine(MODEL, torch.bfloat16, groups[rank], 1, 0, rank, max_seq_len=16)
    sync = WeightSync(trainer, [trtllm_layout(MODEL, 1, 0, r, torch.bfloat16) for r in range(2)], canonical_shapes(MODEL), rank, transport=transport)
    source = {n: t.bfloat16() for n, t in mcore_shard(canonical_tensors(MODEL), MODEL, ParallelConfig(pp=2), rank, 2).items()}
    views, read, seen = Message.views, process_memory.read, []

    def flip_in_bucket(message: Message, buffer: torch.Tensor) -> Any:
        if message.dst == rank == 0:
            buffer[5] ^= 64
        return views(message, buffer)

    def flip_in_memory(*arguments: Any) -> None:
        read(*arguments)
        if rank == 0:
            engine.weights()["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[2, 3] ^= 64

    for version in (1, 2, 3, 3):
        where = (Message, "views", flip_in_bucket) if transport == "point_to_point" else (process_memory, "read", flip_in_memory)
        fault = mock.patch.object(*where)
        try:
            with fault if version == 2 else mock.MagicMock():
                sync.run(source, engine, version)
            seen.append((engine.version, {n: t.clone() for n, t in engine.weights().items()}))
        except WeightsError as error:
            seen.append((engine.version, str(error)))
    return [(v, w if isinstance(w, str) else "as expected") for v, w in seen if isinstance(w, str) or not assert_same(
        w, trtllm_shard(canonical_tensors(MODEL, torch.bfloat16), MODEL, 1, 0))]


@pytest.mark.parametrize("transport", ["shared_memory", "point_to_point"])
def test_a_flipped_bit_is_found_and_the_same_sync_twice_gives_the_same(transport: str) -> None:
    for seen in run_ranks(2, corrupted, transport):
        assert [version for version, _ in seen] == [1, None, 3, 3]
        assert "model.layers.1." in seen[1][1] and "checksum" in seen[1][1]
        assert [text for _, text in seen[2:]] == ["as expected"] * 2


@pytest.mark.parametrize("transport, reads", [("point_to_point", 0), ("point_to_point", 1), ("shared_memory", 0), ("shared_memory", 6)])
def test_a_rank_that_dies_is_an_error_on_all_others(transport: str, reads: int) -> None:
    """Killed when it reads its tensors for the n-th time: the others name it, and do not wait for each other either."""
    first, dead, third = run_and_lose(3, ring, transport, reads, torch.float64)
    assert dead == signal.SIGKILL
    assert "rank 1 is lost" in first and "rank 1 is lost" in third


def test_a_rank_that_dies_while_it_is_read_is_an_error_on_all_others() -> None:
    first, dead, third = run_and_lose(3, killed_while_it_is_read, "shared_memory")
    assert dead == signal.SIGKILL
    for text in (first, third):
        assert "rank 1 is lost" in text or "No such process" in text


@pytest.mark.parametrize("transport", ["point_to_point", "shared_memory"])
def test_no_engine_commits_a_sync_in_which_a_rank_dies(transport: str) -> None:
    """The trainer dies, then one of the engines."""
    for dies in (0, 2):
        results = run_and_lose(3, sync_and_lose, transport, dies)
        assert results.pop(dies) == signal.SIGKILL
        assert all(version is None and error for version, error in results), results
