"""Ranks for tests: a few worker processes, started once per test run, that form a fresh gloo world for each task.

    from tests.worker_pool import run_ranks
    results = run_ranks(2, function, arg, key=value)      # [result of rank 0, result of rank 1]

`function` is a plain function at the top level of an importable module; inside it `torch.distributed` is initialised.
An exception in any rank is raised here with its traceback. A hung task ends the workers; the next task starts new ones.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

POOL_SIZE = 4
FEW_THREADS = 30  # of a worker between tasks
_workers: list[tuple[mp.process.BaseProcess, Connection]] = []


def _worker(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        rank, size, store, function, args, kwargs = task
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
            reply = (True, function(*args, **kwargs))
        except BaseException as error:  # torch's CheckpointException is a BaseException
            reply = (False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            _leave_world(dist)
        try:
            connection.send(reply)
        except Exception as error:
            connection.send((False, f"rank {rank}: the result cannot be sent: {error}"))


def _leave_world(dist: Any) -> None:
    """Destroy the world's groups, and let go of them: one that is still referred to keeps its three threads."""
    import gc
    import sys

    if "megatron.core.parallel_state" in sys.modules:
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
    if "parallel.groups" in sys.modules:
        sys.modules["parallel.groups"].forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if len(os.listdir("/proc/self/task")) > FEW_THREADS:
        _take_groups_from_leaked_modules()


def _take_groups_from_leaked_modules() -> None:
    """Models with experts stay in memory (autograd's nodes refer to them, where Python's collector does not look), and their groups with
    them, whose threads then cost more than all tests."""
    import gc

    for thing in gc.get_objects():
        if str(getattr(type(thing), "__module__", "")).startswith(("megatron.", "parallel.")) and isinstance(held := getattr(thing, "__dict__", None), dict):
            for name in [name for name, value in held.items() if type(value).__name__ == "ProcessGroup"]:
                held[name] = None
    gc.collect()


def _start() -> None:
    context = mp.get_context("spawn")
    for _ in range(POOL_SIZE):
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _workers.append((process, ours))


@atexit.register
def stop() -> None:
    while _workers:
        process, connection = _workers.pop()
        connection.close()
        process.kill()
        process.join()


def run_ranks(size: int, function: Any, *args: Any, timeout: float = 180.0, **kwargs: Any) -> list[Any]:
    """Run `function(*args, **kwargs)` on `size` ranks (at most POOL_SIZE) and return their results in rank order."""
    if not 1 <= size <= POOL_SIZE:
        raise ValueError(f"size {size}: the pool has {POOL_SIZE} workers")
    if not _workers or not all(p.is_alive() for p, _ in _workers):
        stop()
        _start()
    store = tempfile.mktemp(prefix="mcore-rl-store-")
    for rank, (_, connection) in enumerate(_workers[:size]):
        connection.send((rank, size, store, function, args, kwargs))
    replies: dict[int, tuple[bool, Any]] = {}
    ranks = {connection: rank for rank, (_, connection) in enumerate(_workers[:size])}
    while len(replies) < size:
        # once one rank has failed the others may wait for it in a collective: give them a moment, then end them
        failed = any(not ok for ok, _ in replies.values())
        ready = wait([c for c, r in ranks.items() if r not in replies], timeout=5 if failed else timeout)
        if not ready:
            break
        for connection in ready:
            try:
                replies[ranks[connection]] = connection.recv()
            except EOFError:
                replies[ranks[connection]] = (False, f"rank {ranks[connection]}: the process died")
    if os.path.exists(store):
        os.unlink(store)
    if len(replies) < size:
        stop()
    errors = [text for ok, text in replies.values() if not ok]
    if errors or len(replies) < size:
        missing = sorted(set(range(size)) - set(replies))
        raise AssertionError("\n".join(errors) or f"ranks {missing} gave no answer within {timeout} s")
    return [replies[rank][1] for rank in range(size)]
