"""`mcore-rl plan reshard`: what a weight sync would move between which ranks, without weights and without ranks."""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_rl.cli import command
from parallel.config import ParallelConfig
from parallel.errors import UserError
from parallel.hf_values import read_config
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig
from parallel.sizes import parallel_config, sizes
from resharding.errors import CoverageError
from resharding.layout import canonical_blocks
from resharding.layouts import mcore_party, trtllm_party
from resharding.layouts.mcore import McoreParty
from resharding.layouts.trtllm import TrtllmParty
from resharding.plan import Copy, make_plan
from resharding.traffic import Traffic, traffic

GB = 1e9


def add(commands: Any) -> None:
    p = command(commands, "plan", "Show the plan of a weight sync: who sends what to whom, how many bytes, how long at stated bandwidths.",
                "mcore-rl plan reshard --model config.json --train tp4pp8ep16etp1first11last11 --world 128 --rollout tp8",
                "No weights are read and no ranks are started. Layouts are sizes in one word; first and last are the layers of the "
                "first and last pipeline stage.")
    p.add_argument("what", choices=("reshard",), help="the only plan there is: trainer to engine")
    p.add_argument("--model", required=True, metavar="DIR_or_CONFIG", help="a Hugging Face directory or its config.json")
    p.add_argument("--train", required=True, metavar="LAYOUT", help="trainer layout, e.g. tp2pp2, tp4pp8ep16etp1first11last11")
    p.add_argument("--rollout", required=True, metavar="LAYOUT", help="engine layout, e.g. tp8 or tp16ep16 (experts over 16 ranks)")
    p.add_argument("--world", type=int, metavar="N", help="trainer ranks (default: as many as the layout needs)")
    p.add_argument("--replicas", type=int, metavar="N", help="engine replicas (default: as many as fit on the trainer's ranks)")
    p.add_argument("--disjoint", action="store_true", help="the engine has ranks of its own, after the trainer's")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help="default 8")
    for name, default, text in (("local", 2000.0, "copies within a rank"), ("same-host", 300.0, "between ranks of a host"), ("remote", 40.0, "between hosts")):
        p.add_argument(f"--{name}-gb-s", type=float, default=default, metavar="GB", help=f"bandwidth of {text} per rank, for the prediction (default {default:g})")
    p.add_argument("--rank", type=int, metavar="R", help="show the tensors that rank R sends and receives, and time its plan")
    p.add_argument("--show", type=int, default=16, metavar="N", help="ranks or tensors to list (default 16)")
    p.add_argument("--json", action="store_true", help="print the figures as one JSON object on the last line")


def execute(arguments: argparse.Namespace) -> int:
    _check_numbers(arguments)
    model, source, destination = _parties(arguments)
    try:
        if arguments.rank is None:
            figures = _show_all(model, source, destination, arguments)
        else:
            figures = _show_rank(model, source, destination, arguments)
    except CoverageError as error:
        raise UserError(f"plan reshard: {error}") from None
    if arguments.json:
        print(json.dumps(figures), flush=True)
    return 0


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("world", "replicas", "ranks_per_host", "show", "local_gb_s", "same_host_gb_s", "remote_gb_s"):
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"plan reshard: --{name.replace('_', '-')} is {value}; it must be a positive number")


def _parties(arguments: argparse.Namespace) -> tuple[ModelConfig, McoreParty, TrtllmParty]:
    path = Path(arguments.model)
    model = ModelConfig.from_hf(read_config(path)) if path.is_file() else ModelConfig.from_directory(path)
    parallel, engine = parallel_config(arguments.train), sizes(arguments.rollout, ("tp", "ep"))
    if engine.get("ep", 1) > 1 and model.moe is None:
        raise UserError(f"plan reshard: --rollout {arguments.rollout}: {model.family} has no experts; leave ep out")
    world, tp = arguments.world or _smallest_world(parallel), engine.get("tp", 1)
    parallel.validate(world, model, "train")
    replicas = arguments.replicas or max(1, world // tp)
    first = world if arguments.disjoint else 0
    if not arguments.disjoint and replicas * tp > world:
        raise UserError(f"plan reshard: {replicas} replicas of tp {tp} need {replicas * tp} ranks, the trainer has {world}; lower --replicas, "
                        "or give --disjoint for an engine with ranks of its own")
    ranks = tuple(tuple(range(first + i * tp, first + (i + 1) * tp)) for i in range(replicas))
    dtype = torch_dtype(arguments.dtype)
    return model, mcore_party(model, parallel, world, dtype), trtllm_party(model, ranks, dtype, engine.get("ep", 1))


def _smallest_world(parallel: ParallelConfig) -> int:
    dense, expert = parallel.tp * parallel.cp, parallel.expert_tp * parallel.ep
    return parallel.pp * next(n for n in range(dense, dense * expert + 1, dense) if n % expert == 0)


@lru_cache(maxsize=8)
def _hosts(per_host: int) -> Any:
    return lambda rank: rank // per_host


def _show_all(model: ModelConfig, source: McoreParty, destination: TrtllmParty, a: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    moved = traffic(source, destination, canonical_blocks(model), _hosts(a.ranks_per_host))
    seconds = time.perf_counter() - started
    bandwidths = (a.local_gb_s * GB, a.same_host_gb_s * GB, a.remote_gb_s * GB)
    ranks = sorted({*source.ranks, *destination.ranks})
    predicted = {rank: moved.seconds(rank, *bandwidths) for rank in ranks}
    table = Table("rank", "local GB", "same host GB", "remote GB", "sends GB", "predicted s", title=_title(model, source, destination, a), title_justify="left")
    for rank in ranks if len(ranks) <= a.show else sorted(ranks, key=lambda r: -predicted[r])[:a.show]:
        cells = (moved.local[rank], moved.same_host[rank], moved.remote[rank], moved.sent[rank])
        table.add_row(str(rank), *(f"{cell / GB:.3f}" for cell in cells), f"{predicted[rank]:.3f}")
    figures = _figures(moved, source, predicted, seconds)
    console = Console()
    console.print(table)
    if len(ranks) > a.show:
        console.print(f"the {a.show} slowest of {len(ranks)} ranks; --show N lists more, --rank R the tensors of one")
    console.print(f"{moved.tensors:,} canonical tensors, {figures['bytes_needed'] / GB:,.2f} GB into all engine ranks: {figures['local'] / GB:,.2f} local, "
                  f"{figures['same_host'] / GB:,.2f} same host, {figures['remote'] / GB:,.2f} remote; the busiest sender of a stage sends "
                  f"{figures['imbalance_within_stage']:.3f} of its mean; slowest rank {figures['predicted_seconds']:.3f} s")
    return figures


def _figures(moved: Traffic, source: McoreParty, predicted: dict[int, float], seconds: float) -> dict[str, Any]:
    stage = len(source.ranks) // source.parallel.pp
    stages = [source.ranks[i:i + stage] for i in range(0, len(source.ranks), stage)]
    return {"tensors": moved.tensors, "bytes_needed": moved.bytes_needed, "local": moved.local.total(), "same_host": moved.same_host.total(),
            "remote": moved.remote.total(), "imbalance_within_stage": moved.imbalance(stages), "imbalance": moved.imbalance([source.ranks]),
            "predicted_seconds": max(predicted.values()), "traffic_seconds": seconds}


def _show_rank(model: ModelConfig, source: McoreParty, destination: TrtllmParty, a: argparse.Namespace) -> dict[str, Any]:
    if a.rank not in {*source.ranks, *destination.ranks}:
        raise UserError(f"plan reshard: --rank {a.rank} is none of the {len({*source.ranks, *destination.ranks})} ranks")
    started = time.perf_counter()
    plan = make_plan(source, destination, canonical_blocks(model), rank=a.rank, host_of=_hosts(a.ranks_per_host))
    seconds = time.perf_counter() - started
    table = Table("canonical tensor", "region", "from", "to", "bytes", title=_title(model, source, destination, a) + f", rank {a.rank}", title_justify="left")
    for copy in plan.copies[:a.show]:
        table.add_row(copy.canonical, _slices(copy), f"{copy.src_rank}: {copy.src_tensor}", f"{copy.dst_rank}: {copy.dst_tensor}", f"{copy.nbytes:,}")
    console = Console(width=200) if not Console().is_terminal else Console()
    console.print(table)
    sent, received = plan.bytes_sent[a.rank], plan.bytes_received[a.rank]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(f"{len(plan.copies):,} copies ({min(a.show, len(plan.copies))} shown), {received / GB:.3f} GB received, {sent / GB:.3f} GB sent, "
                  f"{plan.bytes_written / GB:.3f} GB written; planned in {seconds:.2f} s, process {memory / GB:.2f} GB")
    return {"rank": a.rank, "copies": len(plan.copies), "bytes_received": received, "bytes_sent": sent, "bytes_written": plan.bytes_written,
            "plan_seconds": seconds, "peak_rss_bytes": memory}


def _slices(copy: Copy) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in copy.region) + "]"


def _title(model: ModelConfig, source: McoreParty, destination: TrtllmParty, a: argparse.Namespace) -> str:
    return (f"{model.family}, {a.train} on {len(source.ranks)} ranks -> {a.rollout} x {len(destination.replicas)} replicas"
            + (" on ranks of their own" if a.disjoint else ""))
