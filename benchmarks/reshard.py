"""Weight sync between two layouts: beside a plain copy of the same bytes, the transport's raw bandwidth, and gathering every tensor whole.

    mcore-rl bench reshard --train tp2pp1 --rollout tp2 --procs 2 --json
    mcore-rl bench reshard --train tp2pp2 --rollout tp2 --procs 4
    mcore-rl bench reshard --train tp2 --rollout tp1 --procs 2 --transport point_to_point
    mcore-rl bench reshard --train tp2 --rollout tp2 --procs 4 --rollout-ranks 2,3

All figures are of all ranks together, from the first to begin to the last to end. The repetitions of all contenders take turns, and of
each the fastest counts, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._gather import Gather
from benchmarks._made_up import model_named, padding_bytes, random_tensors
from launch.local import run_local
from parallel.environment import exit_with_launcher, read_environment, start
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig
from parallel.sizes import parallel_config, sizes
from resharding.layout import canonical_blocks, canonical_shapes
from resharding.layouts import mcore_party, trtllm_party
from resharding.layouts.mcore import McoreParty
from resharding.layouts.trtllm import TrtllmParty
from resharding.plan import Copy, Plan
from resharding.sync import WeightSync
from resharding.transport import TRANSPORTS, execute
from trtllm_rollout.embedded.engine import EmbeddedEngine

Tensors = Mapping[str, torch.Tensor]
def measure(options: list[str]) -> dict[str, Any] | None:
    """The figures, on rank 0 (None on the others). A plain process starts the ranks."""
    a = _options(options)
    parties = _parties(a)  # what does not fit is refused before ranks start
    if a.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench reshard --device cuda: torch sees no CUDA device")
    if read_environment().world_size == 1 and a.procs > 1:
        if code := run_local(a.procs, sys.argv[1:]):
            raise SystemExit(code)
        return None
    with _joined(a.device) as (rank, world, device):
        if world != a.procs:
            raise UserError(f"bench reshard --procs {a.procs}: this world has {world} ranks; start {a.procs}, or a plain process")
        figures = _Bench(a, parties, rank, world, device).measure()
    return figures if rank == 0 else None


def _options(options: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser("mcore-rl bench reshard", description="Measure the weight sync between a trainer's and an engine's layout.")
    p.add_argument("--model", metavar="DIR_or_CONFIG", help="its sizes are taken, its weights are made up (default: a llama of 1.1 GB)")
    p.add_argument("--train", default="tp2pp1", metavar="LAYOUT", help="trainer layout on the first ranks (default tp2pp1)")
    p.add_argument("--rollout", default="tp2", metavar="LAYOUT", help="layout of one engine, e.g. tp2 or tp4ep2 (default tp2)")
    p.add_argument("--rollout-ranks", metavar="R,R,...", help="ranks of the engine; several times tp: replicas (default: the first ranks)")
    p.add_argument("--procs", type=int, default=2, metavar="N", help="ranks (default 2)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the engine (default bfloat16)")
    p.add_argument("--train-dtype", choices=("bfloat16", "float32"), help="of the trainer (default: the engine's)")
    p.add_argument("--transport", choices=("auto", *TRANSPORTS), default="auto", help="between ranks (default auto)")
    p.add_argument("--bucket-mb", type=float, default=64, metavar="MB", help="MiB in each of the two buckets (default 64)")
    p.add_argument("--repeat", type=int, default=5, metavar="N", help="the fastest of N counts (default 5)")
    p.add_argument("--no-checksums", action="store_true", help="leave out the syncs with checksums (`seconds` is then without)")
    p.add_argument("--no-gather", action="store_true", help="leave out the rival")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="ranks share the GPUs there are (default cpu)")
    a = p.parse_args(options)
    if a.procs < 1 or a.repeat < 1 or a.bucket_mb <= 0:
        raise UserError(f"bench reshard: --procs {a.procs} and --repeat {a.repeat} must be at least 1, --bucket-mb {a.bucket_mb} positive")
    return a


@contextmanager
def _joined(device: str) -> Iterator[tuple[int, int, torch.device]]:
    """Join the world: NCCL where every rank has a GPU of its own, gloo everywhere else."""
    environment = read_environment()
    count = torch.cuda.device_count() if device == "cuda" else 0
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // environment.local_world_size))
    exit_with_launcher(environment)
    if count:
        torch.cuda.set_device(environment.local_rank % count)
    start(environment, "cpu:gloo,cuda:nccl" if count >= environment.local_world_size else "gloo")
    try:
        yield environment.rank, environment.world_size, torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    finally:
        dist.destroy_process_group()


@dataclass
class _Best:
    """The fastest repetition of each contender."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], Any]) -> None:
        """Seconds until the last rank has done `work`, all having begun together."""
        dist.barrier()
        started = time.perf_counter()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if seconds.item() < self.seconds.get(name, float("inf")):
            self.seconds[name], self.results[name] = seconds.item(), result


def _parties(a: argparse.Namespace) -> tuple[ModelConfig, McoreParty, TrtllmParty]:
    """Model, trainer and engine. Raises UserError where they do not fit the options."""
    model, parallel, engine = model_named(a.model), parallel_config(a.train), sizes(a.rollout, ("tp", "ep"))
    need, tp = parallel.tp * parallel.pp * parallel.cp, engine.get("tp", 1)
    if need > a.procs:
        raise UserError(f"bench reshard: --train {a.train} needs {need} ranks, --procs is {a.procs}")
    parallel.validate(need, model, "train")
    ranks = _ranks(a, tp)
    replicas = tuple(tuple(ranks[i:i + tp]) for i in range(0, len(ranks), tp))
    source = mcore_party(model, parallel, need, torch_dtype(a.train_dtype or a.dtype))
    return model, source, trtllm_party(model, replicas, torch_dtype(a.dtype), engine.get("ep", 1))


def _ranks(a: argparse.Namespace, tp: int) -> list[int]:
    try:
        ranks = [int(r) for r in a.rollout_ranks.split(",")] if a.rollout_ranks else list(range(tp))
    except ValueError:
        raise UserError(f"bench reshard: --rollout-ranks is {a.rollout_ranks!r}; write ranks with commas between, e.g. 2,3") from None
    if len(ranks) % tp or not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(a.procs)):
        raise UserError(f"bench reshard: engine ranks {ranks} must be different ranks below --procs {a.procs}, a multiple of tp {tp} of them")
    return ranks


class _Bench:
    def __init__(self, a: argparse.Namespace, parties: tuple[ModelConfig, McoreParty, TrtllmParty], rank: int, world: int,
                 device: torch.device) -> None:
        self.a, self.rank, self.world, self.device = a, rank, world, device
        self.model, self.source, self.destination = parties
        self.mine = self.destination.layout(rank) if rank in self.destination.ranks else None
        self.trainer = random_tensors(self.source.layout(rank), device) if rank in self.source.ranks else {}
        self.engine = self._engine()
        self.best = _Best(device)

    def _engine(self) -> Any:
        replicas, dtype = self.destination.replicas, self.destination.dtype
        groups = [dist.new_group(list(replica)) for replica in replicas]
        found = next(((i, replica) for i, replica in enumerate(replicas) if self.rank in replica), None)
        if found is None:
            return None
        i, replica = found
        engine = EmbeddedEngine(self.model, dtype, groups[i], len(replica), replica.index(self.rank), self.rank,
                                max_seq_len=min(256, self.model.max_position_embeddings), device=self.device)
        for tensor in engine.weights().values():  # the first touch of a page is not part of a copy
            tensor.fill_(1)
        return engine

    def measure(self) -> dict[str, Any]:
        a, best = self.a, self.best
        bucket = int(a.bucket_mb * (1 << 20))
        sync, seconds = self._planned(bucket, checksums=True)
        bare, _ = self._planned(bucket, checksums=False)
        weights = self.engine.weights() if self.engine else {}
        moved = execute(bare.plan, self.trainer, weights, self.rank, None, bucket, transport=a.transport)  # also the warm-up
        peak = self._peak_growth(lambda: self._planned(bucket, checksums=True)[0].run(self.trainer, self.engine, 0))
        synced = {name: t.clone() for name, t in weights.items()}
        copied = {name: torch.ones_like(t) for name, t in weights.items()}
        raw = self._raw(bare.plan)
        rival = None if a.no_gather else Gather(self.source, canonical_shapes(self.model), self.mine, self.rank, self.device)
        gathers: list[float] = []
        raw_gathers: list[float] = []
        for version in range(1, a.repeat + 1):
            best.time("bare", lambda: bare.run(self.trainer, self.engine, version))
            best.time("copy", lambda: [copied[n].copy_(t) for n, t in synced.items()])
            best.time("raw", lambda: execute(*raw, self.rank, None, bucket, transport=a.transport))
            if not a.no_checksums:
                best.time("sync", lambda: sync.run(self.trainer, self.engine, version))
            if rival is not None and version <= 3:
                best.time("gather", lambda: rival.run(self.trainer, copied))
                gathers.append(rival.rate())
                raw_gathers.append(rival.bandwidth())
        if different := [n for n, t in weights.items() if not torch.equal(t, synced[n])]:
            raise RuntimeError(f"two syncs of the same weights differ: {different[:4]}")
        if rival is not None and (different := [n for n, t in copied.items() if not torch.equal(t, synced[n])]):
            raise RuntimeError(f"the rival gives other weights than the sync: {different[:4]}")
        return self._figures(moved.by_transport, peak, seconds, raw[0], max(gathers, default=0.0), max(raw_gathers, default=0.0))

    def _planned(self, bucket: int, checksums: bool) -> tuple[WeightSync, float]:
        dist.barrier()
        started = time.perf_counter()
        sync = WeightSync(self.source, self.destination, canonical_blocks(self.model), self.rank, None, bucket,
                          transport=self.a.transport, checksums=checksums)
        return sync, time.perf_counter() - started

    def _peak_growth(self, work: Callable[[], Any]) -> int:
        """Bytes by which a rank's memory grows at most while it works."""
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            return torch.cuda.max_memory_allocated() - before
        before = _reset_peak_resident()
        work()
        return max(0, _status("VmHWM") - before)

    def _raw(self, plan: Plan) -> tuple[Plan, Tensors, Tensors]:
        """For every pair of ranks, one large contiguous buffer of the bytes that the plan moves between them; local bytes only if all are."""
        pairs: dict[tuple[int, int], int] = {}
        for copy in plan.copies:
            pairs[copy.src_rank, copy.dst_rank] = pairs.get((copy.src_rank, copy.dst_rank), 0) + copy.nbytes
        between = _sum(sum(n for (src, dst), n in pairs.items() if src != dst))
        copies, source, destination = [], {}, {}
        for (src, dst), n in pairs.items():
            if src == dst and between:
                continue
            name, box = f"{src} to {dst}", ((0, n),)
            copies.append(Copy(src, name, box, dst, name, box, name, torch.uint8, box, src * self.world + dst))
            if src == self.rank:
                source[name] = torch.ones(n, dtype=torch.uint8, device=self.device)
            if dst == self.rank:
                destination[name] = torch.ones(n, dtype=torch.uint8, device=self.device)
        return Plan(tuple(sorted(copies, key=lambda c: c.order)), (), self.rank), source, destination

    def _figures(self, moved: Mapping[str, int], peak: int, plan_seconds: float, raw: Plan, gather: float, raw_gather: float) -> dict[str, Any]:
        s, results = self.best.seconds, self.best.results
        names = sorted({name for rank in _everyone(dict(moved)) for name in rank})
        needed = _sum(sum(t.nbytes for t in self.engine.weights().values()) - padding_bytes(self.mine)) if self.engine else _sum(0)
        by_name = {name: _sum(moved.get(name, 0)) for name in names}
        raw_bytes = _sum(sum(c.nbytes for c in raw.copies if c.dst_rank == self.rank))
        checksum = max(_everyone(results["sync"].checksum_seconds)) if "sync" in s else 0.0
        bytes_moved, seconds = sum(by_name.values()), s.get("sync", s["bare"])
        copy_rate, raw_rate, bare_rate = needed / s["copy"], raw_bytes / s["raw"], bytes_moved / s["bare"]
        figures: dict[str, Any] = {
            "bytes_needed": needed, "bytes_moved": bytes_moved, "bytes_between_ranks": bytes_moved - by_name.get("in_place", 0),
            "seconds": seconds, "seconds_without_checksums": s["bare"], "checksum_seconds": checksum, "plan_seconds": max(_everyone(plan_seconds)),
            "gb_per_s": bytes_moved / seconds / 1e9, "gb_per_s_without_checksums": bare_rate / 1e9,
            "copy_gb_per_s": copy_rate / 1e9, "of_copy": bytes_moved / seconds / copy_rate, "of_copy_without_checksums": bare_rate / copy_rate,
            "transport": " + ".join(names), "transport_gb_per_s": raw_rate / 1e9, "of_transport_without_checksums": bare_rate / raw_rate,
            "peak_extra_bytes": max(_everyone(peak)), "bucket_bytes": int(self.a.bucket_mb * (1 << 20))}
        if "gather" in s:
            rate, raw_gather_rate = _slowest(_everyone(gather)), _slowest(_everyone(raw_gather))
            figures |= {"gather_seconds": s["gather"], "gather_fairness": rate / raw_gather_rate, "all_gather_gb_per_s": raw_gather_rate / 1e9,
                        "times_faster_than_gather": s["gather"] / seconds, "times_faster_than_gather_without_checksums": s["gather"] / s["bare"]}
        return figures | {"train": self.a.train, "rollout": self.a.rollout, "procs": self.world, "dtype": self.a.dtype, "device": self.device.type}


def _everyone(mine: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, mine)
    return out


def _sum(mine: int) -> int:
    return sum(_everyone(mine))


def _slowest(values: list[float]) -> float:
    """Of the ranks that measured anything."""
    return min((v for v in values if v), default=1.0)


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _reset_peak_resident() -> int:
    """Let the kernel count the peak anew; the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")
