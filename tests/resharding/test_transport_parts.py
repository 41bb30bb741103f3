"""The parts of transports: messages that both ends agree on, strided reads of another process's memory, copies within a rank."""

from __future__ import annotations

import gc
import os
import weakref
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.config import ParallelConfig
from parallel.errors import UserError
from resharding.layout import View, canonical_shapes, empty_tensors
from resharding.layouts import mcore_layout, trtllm_layout
from resharding.plan import Copy, Plan, make_plan
from resharding.transport import in_place, process_memory
from resharding.transport.buckets import Buckets, SharedBytes, open_bytes
from resharding.transport.messages import BLOCK, messages_of, split
from resharding.transport.process_memory import Part
from tests.resharding.direct import assert_same, canonical_tensors, mcore_shard, tiny, trtllm_shard

BF16 = torch.bfloat16


def copy_of(shape: tuple[int, ...], start: tuple[int, ...], dtype: torch.dtype = BF16) -> Copy:
    box = tuple((0, n) for n in shape)
    return Copy(0, "a", box, 1, "b", tuple((n + 3, 2 * n + 3) for n in shape), "c", dtype, tuple((s, s + n) for s, n in zip(start, shape)))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 300)), max_size=3), st.integers(16, 200))
def test_slabs_make_up_the_copy_and_fit_the_bucket(sides: list[tuple[int, int]], limit: int) -> None:
    copy = copy_of(tuple(n for n, _ in sides), tuple(s for _, s in sides))
    count = torch.zeros([n for n, _ in sides], dtype=torch.int)
    for part in split(copy, limit):
        assert part.nbytes <= limit
        count[tuple(slice(*b) for b in part.src_box)] += 1
        for (a, b), (c, d), (e, f), (n, s) in zip(part.src_box, part.dst_box, part.region, sides):
            assert (c, d) == (a + n + 3, b + n + 3) and (e, f) == (a + s, b + s)
    assert bool((count == 1).all())


def test_large_slabs_end_where_blocks_of_128_rows_end() -> None:
    parts = split(copy_of((1000, 4), (50, 0)), 200 * 4 * 2)
    assert [part.region[0] for part in parts] == [(50, 128), (128, 256), (256, 384), (384, 512), (512, 640), (640, 768), (768, 896), (896, 1050)]
    assert BLOCK == 128


@pytest.mark.parametrize("bucket", [16, 100, 600, 1 << 20])
def test_both_ends_make_the_same_messages_from_plans_of_their_own(bucket: int) -> None:
    model = tiny("qwen2")
    trainer = [mcore_layout(model, ParallelConfig(tp=2, pp=2), r, 4, torch.float32) for r in range(4)]
    engines = [trtllm_layout(model, 1, 0, r, BF16) for r in range(4)]
    seen: dict[tuple[int, int, int, int], list] = {}
    sent = 0
    for rank in range(4):
        plan = make_plan(trainer, engines, canonical_shapes(model), rank=rank)
        messages = messages_of(plan.copies, rank, bucket)
        assert [m.key for m in messages] == sorted(m.key for m in messages) and len({m.key for m in messages}) == len(messages)
        assert all(m.nbytes <= bucket for m in messages)
        sent += sum(c.nbytes for m in messages if m.src == rank for c in m.copies)
        assert sum(c.nbytes for m in messages if m.dst == rank for c in m.copies) == plan.bytes_received[rank]
        for message in messages:
            seen.setdefault(message.key, []).append((message.src, message.dst, [(c.canonical, c.region) for c in message.copies]))
    assert all(len(both) == 2 and both[0] == both[1] for both in seen.values())
    assert sent == sum(make_plan(trainer, engines, canonical_shapes(model)).bytes_received.values())


def test_a_bucket_too_small_for_one_element_is_refused() -> None:
    with pytest.raises(UserError, match="bucket_bytes is 15; it must be at least 16"):
        messages_of((), 0, 15)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)), min_size=0, max_size=3), st.permutations(range(3)), st.booleans())
def test_strided_memory_is_read_as_a_copy_would(sides: list[tuple[int, int, int]], order: list[int], wide: bool) -> None:
    """Views with gaps in every dimension on both sides, transposed on one: read from this very process."""
    dtype = torch.float64 if wide else torch.int16
    dims = [d for d in order if d < len(sides)]
    source = torch.arange(prod(n * a for n, a, _ in sides)).to(dtype).view([n * a for n, a, _ in sides])
    source = source[tuple(slice(None, None, a) for _, a, _ in sides)].permute(dims)
    target = torch.zeros([sides[d][0] * sides[d][2] for d in dims], dtype=dtype)
    part = target[tuple(slice(None, None, sides[d][2]) for d in dims)]
    local, remote = (Part(t.data_ptr(), tuple(s * t.element_size() for s in t.stride())) for t in (part, source))
    process_memory.read(os.getpid(), tuple(part.shape), part.element_size(), local, remote)
    expected = torch.zeros_like(target)
    expected[tuple(slice(None, None, sides[d][2]) for d in dims)] = source
    assert torch.equal(target, expected)


def test_more_rows_than_one_call_takes_are_read() -> None:
    source = torch.arange(5000 * 6, dtype=torch.int32).view(5000, 6)
    target = torch.zeros(5000, 3, dtype=torch.int32)
    process_memory.read(os.getpid(), (5000, 3), 4, Part(target.data_ptr(), (12, 4)), Part(source.data_ptr() + 8, (24, 4)))
    assert torch.equal(target, source[:, 2:5])


def test_reading_what_is_not_there_is_an_error() -> None:
    target = torch.zeros(64, dtype=torch.uint8)
    for pid, address in ((os.getpid(), 8), (2 ** 22 + 1, target.data_ptr())):  # an address, and a process, that does not exist
        with pytest.raises(OSError, match=f"reading the memory of process {pid}"):
            process_memory.read(pid, (64,), 1, Part(target.data_ptr(), (1,)), Part(address, (1,)))


def test_shared_buckets_have_no_name_and_go_with_their_owner() -> None:
    held = SharedBytes(4096)
    path = held.path
    assert os.readlink(path).startswith("/memfd:")
    seen = open_bytes(path, 4096)
    held.tensor[7] = 9
    assert seen[7] == 9
    del held
    assert not os.path.exists(path) or not os.readlink(path).startswith("/memfd:mcore-rl")
    assert seen[7] == 9  # what is mapped stays until it is let go


def test_buckets_grow_to_what_is_asked_and_no_further() -> None:
    buckets = Buckets(torch.device("cpu"))
    buckets.reserve(5000)
    first = buckets.tensor.data_ptr()
    buckets.reserve(100)
    assert buckets.tensor.data_ptr() == first and len(buckets.tensor) == 2 * 8192
    buckets.part(0, 5000).fill_(1)
    assert not buckets.part(1, 5000).any()


def colocated() -> tuple[Plan, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = tiny("qwen2", num_kv_heads=4)
    trainer, engine = mcore_layout(model, ParallelConfig(), 0, 1, BF16), trtllm_layout(model, 1, 0, 0, BF16)
    full = canonical_tensors(model, BF16)
    source = {n: t.clone() for n, t in mcore_shard(full, model, ParallelConfig(), 0, 1).items()}
    return make_plan([trainer], [engine], canonical_shapes(model), rank=0), source, empty_tensors(engine), trtllm_shard(full, model, 1, 0)


def test_neighbours_are_copied_at_once_and_a_new_place_is_noticed() -> None:
    plan, source, destination, expected = colocated()
    in_place.execute(plan, source, destination)
    assert_same(destination, expected)
    program = plan._cache["in_place", 0]
    assert len(program.parts) < len(plan.copies) and not program.computed  # gate and up of a layer are one copy
    for name, tensor in source.items():  # the same values, laid out otherwise
        source[name] = torch.stack([tensor, tensor])[1] if tensor.dim() == 1 else tensor.t().contiguous().t()
    for name, tensor in destination.items():
        destination[name] = torch.zeros(*tensor.shape, 2, dtype=BF16)[..., 1]
    in_place.execute(plan, source, destination)
    assert_same(destination, expected)
    in_place.execute(plan, {n: t.float() for n, t in source.items()}, destination)
    assert_same(destination, expected)


def test_a_plan_keeps_no_weights_alive() -> None:
    plan, source, destination, _ = colocated()
    in_place.execute(plan, source, destination)
    kept = [weakref.ref(t) for t in (*source.values(), *destination.values())]
    storages = [t.untyped_storage()._weak_ref() for t in (*source.values(), *destination.values())]
    source.clear()
    destination.clear()
    gc.collect()
    assert not [r for r in kept if r() is not None]
    assert all(torch.UntypedStorage._expired(s) for s in storages)


def test_views_that_select_and_stride_are_copied() -> None:
    """An expert of a stack, transposed, every second row: the copy's boxes are in the view."""
    view = View((1,), True, 1, 2)
    source, target = torch.arange(24.0).view(4, 6), torch.zeros(3, 5, 20)
    box = ((0, 4), (0, 3))
    copy = Copy(0, "s", ((0, 4), (2, 5)), 0, "d", box, "c", torch.float32, box, 0, View(), view)
    in_place.execute(Plan((copy,), ()), {"s": source}, {"d": target})
    expected = torch.zeros(3, 5, 20)
    for i, j in product(range(4), range(3)):
        expected[1, j, 1 + 2 * i] = source[i, 2 + j]
    assert torch.equal(target, expected)
