"""Weight sync: trainer TP2 to engine TP2, beside a plain copy of the same bytes and beside gathering every tensor whole.

    mcore-rl bench sync --json
    torchrun --nproc-per-node 2 -m mcore_rl bench sync --model models/SmolLM2-135M-Instruct

All figures are of all ranks together; of the repetitions the fastest counts, for each on its own.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from launch.local import run_local
from mcore_rl.run import World, joined
from parallel.config import ParallelConfig
from parallel.environment import read_environment
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig
from resharding.boxes import slices
from resharding.checksum import piece_checksums
from resharding.layout import Layout, canonical_shapes, empty_tensors
from resharding.layouts import hf_layout, mcore_layout, trtllm_layout
from resharding.plan import make_plan
from resharding.sync import WeightSync
from resharding.transport import in_place
from trtllm_rollout.embedded.engine import EmbeddedEngine

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
# a llama of 125 million parameters: 0.25 GB in bfloat16
MADE_UP = dict(model_type="llama", hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
               num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048, rope_theta=10000.0, rms_norm_eps=1e-5)


def measure(options: list[str]) -> dict[str, float | str] | None:
    """bytes, seconds and GB/s of a sync, of which checksums; the same bytes by copy_; the rival. None where other ranks report."""
    arguments = _options(options)
    if read_environment().world_size == 1:
        if code := run_local(arguments.tp, sys.argv[1:]):
            raise SystemExit(code)
        return None
    with joined(arguments.device, 1) as world:
        if world.size != arguments.tp:
            raise UserError(f"bench sync --tp {arguments.tp} runs on as many ranks, this world has {world.size}; start {arguments.tp}, or a plain process")
        figures = _measure(_model(arguments.model), torch_dtype(arguments.dtype), world, arguments.repeat)
        return figures if world.rank == 0 else None


def _options(options: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser("mcore-rl bench sync", description="Measure the weight sync from trainer to engine.")
    p.add_argument("--model", metavar="DIR_or_CONFIG", help="its sizes are taken, its weights are made up (default: a llama of 0.25 GB)")
    p.add_argument("--tp", type=int, default=2, metavar="N", help="tensor-parallel size of both, and number of ranks (default 2)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--repeat", type=int, default=5, metavar="N", help="the fastest of N counts (default 5)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = p.parse_args(options)
    if arguments.tp < 2 or arguments.repeat < 1:
        raise UserError(f"bench sync: --tp {arguments.tp} must be at least 2 and --repeat {arguments.repeat} at least 1")
    return arguments


def _model(name: str | None) -> ModelConfig:
    if name is None:
        return ModelConfig.from_hf(MADE_UP)
    path = Path(name)
    return ModelConfig.from_directory(path.parent if path.name == "config.json" else path)


def _measure(model: ModelConfig, dtype: torch.dtype, world: World, repeat: int) -> dict[str, float | str]:
    tp, rank, device = world.size, world.rank, world.device.torch
    parallel = ParallelConfig(tp=tp)
    parallel.validate(tp, model)
    sources = [mcore_layout(model, parallel, r, tp, dtype) for r in range(tp)]
    destinations = [trtllm_layout(model, tp, r, r, dtype) for r in range(tp)]
    trainer = empty_tensors(sources[rank], device)
    in_place.execute(make_plan([hf_layout(model, torch.float32)], [sources[rank]], canonical_shapes(model), source_is_everywhere=True,
                               read_all=False), MadeUp(canonical_shapes(model)), trainer, rank)
    engine = EmbeddedEngine(model, dtype, dist.group.WORLD, tp, rank, rank, max_seq_len=min(256, model.max_position_embeddings), device=device)
    started = time.perf_counter()
    sync = WeightSync(sources, destinations, canonical_shapes(model), rank)
    plan_seconds = time.perf_counter() - started
    runs = [_slowest(lambda v=v: sync.run(trainer, engine, v), world) for v in range(repeat)]  # type: ignore[misc]
    seconds = min(s for s, _ in runs)
    report = min((r for _, r in runs), key=lambda r: r.checksum_seconds)
    synced = {name: t.clone() for name, t in engine.weights().items()}
    copied = empty_tensors(destinations[rank], device)
    verify = min(_slowest(lambda: piece_checksums(destinations[rank], synced), world)[0] for _ in range(repeat))
    copy = min(_slowest(lambda: [copied[n].copy_(t) for n, t in synced.items()], world)[0] for _ in range(repeat))
    rival = min(_slowest(lambda: gather_and_slice(sources, trainer, destinations[rank], copied, rank), world)[0] for _ in range(repeat))
    if different := [n for n, t in copied.items() if not torch.equal(t, synced[n])]:
        raise RuntimeError(f"the rival gives other weights than the sync: {different[:4]}")
    size = float(report.bytes)
    return {"bytes": size, "seconds": seconds, "gb_per_s": size / seconds / 1e9, "checksum_seconds": report.checksum_seconds,
            "verify_seconds": verify, "plan_seconds": plan_seconds, "copy_seconds": copy, "copy_gb_per_s": size / copy / 1e9,
            "rival_seconds": rival, "rival_gb_per_s": size / rival / 1e9,
            "bytes_between_ranks": float(sum(sync.plan.bytes_sent.values())), "tp": float(tp), "device": world.device.type}


def _slowest(work: Callable[[], T], world: World) -> tuple[float, T]:
    """Seconds until the last rank has done `work`, all having begun together, and this rank's result."""
    dist.barrier()
    started = time.perf_counter()
    result = work()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=world.device.torch)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), result


def gather_and_slice(sources: list[Layout], trainer: Tensors, mine: Layout, engine: Tensors, rank: int) -> None:
    """The rival: all-gather each trainer tensor, put the canonical tensors together whole on every rank, slice the engine's parts."""
    places: dict[str, list[tuple[torch.Tensor, tuple[slice, ...], tuple[slice, ...]]]] = {}
    for local in mine.tensors:
        for piece in local.pieces:
            if piece.canonical is not None:
                places.setdefault(piece.canonical, []).append((engine[local.name], slices(piece.place), slices(piece.region)))
            else:
                engine[local.name][slices(piece.place)].zero_()
    for local in sources[rank].tensors:
        mine_now = trainer[local.name]
        shards = [torch.empty_like(mine_now) for _ in sources]
        dist.all_gather(shards, mine_now)
        whole: dict[str, torch.Tensor] = {}
        for shard, layout in zip(shards, sources, strict=True):
            for piece in layout[local.name].pieces:
                if piece.canonical is not None:
                    _whole(whole, piece.canonical, sources, local.name, shard)[slices(piece.region)] = shard[slices(piece.place)]
        for name, tensor in whole.items():
            for target, place, region in places[name]:
                target[place].copy_(tensor[region])


def _whole(whole: dict[str, torch.Tensor], canonical: str, sources: list[Layout], name: str, like: torch.Tensor) -> torch.Tensor:
    """The canonical tensor that is being put together, made at its first shard."""
    if canonical not in whole:
        ends = [[stop for _, stop in p.region] for layout in sources for p in layout[name].pieces if p.canonical == canonical]
        whole[canonical] = torch.empty([max(e) for e in zip(*ends, strict=True)], dtype=like.dtype, device=like.device)
    return whole[canonical]


class MadeUp(Mapping[str, torch.Tensor]):
    """Random canonical tensors, the same on every rank, made when they are asked for."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._make = lru_cache(maxsize=3)(self._random)

    def _random(self, name: str) -> torch.Tensor:
        return torch.randn(self.shapes[name], generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
