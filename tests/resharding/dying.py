"""Worlds of ranks that may be killed: short-lived processes, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from resharding.layout import canonical_shapes, empty_tensors
from resharding.layouts import mcore_layout, trtllm_layout
from resharding.plan import Copy, Plan
from resharding.sync import WeightSync
from resharding.transport import execute, same_host
from resharding.transport.peers import meet
from tests.resharding.direct import canonical_tensors, mcore_shard, tiny

_context = mp.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def run_and_lose(size: int, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
    """Run `function(*args)` on `size` ranks. For each rank: its result, the text of its error, or the number of the signal it died of."""
    store = tempfile.mktemp(prefix="mcore-rl-store-")
    pipes = [_context.Pipe(duplex=False) for _ in range(size)]
    ranks = [_context.Process(target=_rank, args=(store, rank, size, pipes[rank][1], function, args)) for rank in range(size)]
    for process, (_, sender) in zip(ranks, pipes):
        process.start()
        sender.close()
    end = time.monotonic() + limit
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    out: list[Any] = []
    for process, (receiver, _) in zip(ranks, pipes):
        hung = process.is_alive()
        process.kill()
        process.join()
        out.append("hangs" if hung else receiver.recv() if process.exitcode == 0 else -(process.exitcode or 0))
    return out


def _rank(store: str, rank: int, size: int, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        pipe.send(function(*args))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    pipe.close()
    os._exit(0)  # like a rank whose main program ends with an error: no farewell to the others


class Deadly(dict[str, torch.Tensor]):
    """Source tensors of a rank that is killed when one of them is read for the n-th time."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], name: str, reads: int) -> None:
        super().__init__(tensors)
        self.name, self.left = name, reads

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.name:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


def ring(transport: str, reads: int, dtype: torch.dtype) -> dict[int, bool]:
    """Every rank sends to every other, in small messages; rank 1 dies. Returns which ranks' values arrived, if no error was raised."""
    rank, world, rows = dist.get_rank(), dist.get_world_size(), 40
    meet(None)
    copies, box = [], ((0, 64),)
    for order in range(rows):
        for src in range(world):
            copies += [Copy(src, f"{order}", box, dst, f"{src} {order}", box, f"{src} {order}", torch.float32, box, order)
                       for dst in range(world) if dst != src]
    plan = Plan(tuple(c for c in copies if rank in (c.src_rank, c.dst_rank)), (), rank)
    tensors = {f"{order}": torch.full((64,), rank + 1.0, dtype=dtype) for order in range(rows)}
    source = Deadly(tensors, f"{rows // 2}", reads) if rank == 1 else tensors
    destination = {f"{src} {order}": torch.zeros(64) for src in range(world) for order in range(rows)}
    execute(plan, source, destination, rank, None, 512, transport=transport)
    return {src: all(bool((destination[f"{src} {i}"] == src + 1).all()) for i in range(rows)) for src in range(world) if src != rank}


def killed_while_it_is_read(transport: str) -> Any:
    """Rank 1 dies after it has offered its memory, before the others read it."""
    def die(move: Any, messages: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with mock.patch.object(same_host._Move, "_packed", die) if dist.get_rank() == 1 else mock.MagicMock():
        return ring(transport, 1 << 30, torch.float32)


class Engine:
    """Weights and the version they are at. `dies`: at the second commit."""

    def __init__(self, tensors: dict[str, torch.Tensor], dies: bool) -> None:
        self.tensors, self.dies, self.version = tensors, dies, None

    def begin_update(self) -> None:
        self.version = None

    def weights(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def commit(self, version: int, checksums: Mapping[str, int]) -> None:
        if self.dies and version == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.version = version  # type: ignore[assignment]

    def verify(self) -> None:
        pass


def sync_and_lose(transport: str, dies: int) -> tuple[int | None, str]:
    """Trainer on rank 0, an engine each on ranks 1 and 2; rank `dies` is killed in the second sync. The version and the error after it."""
    model, rank = tiny(num_layers=2), dist.get_rank()
    trainer = [mcore_layout(model, ParallelConfig(), 0, 1, torch.float32)]
    engines = [trtllm_layout(model, 1, 0, r, torch.bfloat16) for r in (1, 2)]
    sync = WeightSync(trainer, engines, canonical_shapes(model), rank, transport=transport)
    engine = Engine(empty_tensors(engines[rank - 1]), rank == dies) if rank else None
    source: dict[str, torch.Tensor] = mcore_shard(canonical_tensors(model), model, ParallelConfig(), 0, 1) if rank == 0 else {}
    sync.run(source, engine, 1)
    assert engine is None or engine.version == 1
    if rank == dies == 0:
        source = Deadly(source, "decoder.layers.1.mlp.linear_fc1.weight", 2)
    try:
        sync.run(source, engine, 2)
    except Exception as error:
        return engine and engine.version, f"{type(error).__name__}: {error}"
    return engine and engine.version, ""
