"""Plans at scale, without weights: seconds and memory of the slowest rank's plan, and how evenly the senders are loaded.

    mcore-rl bench plan --json                       # Qwen3-235B-A22B on 128 ranks, DeepSeek-V3 on 1,024
    mcore-rl bench plan --every 1                    # every rank, not one of every stage

Every plan is made in a fresh process, as a rank would: imports are not counted, everything else is. The limits are those that a
sync's first step may cost: 5 s and 1 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import track

from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.sizes import parallel_config
from resharding.layout import canonical_blocks
from resharding.layouts import mcore_party, trtllm_party
from resharding.layouts.mcore import McoreParty
from resharding.layouts.trtllm import TrtllmParty
from resharding.plan import make_plan
from resharding.traffic import traffic

QWEN3_235B = dict(
    model_type="qwen3_moe", hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4,
    head_dim=128, vocab_size=151936, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, rope_theta=1e6)
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
    vocab_size=129280, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3,
    n_group=8, topk_group=4, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_theta=10000)
# name -> (config, trainer layout, trainer ranks, engine tp, engine ep, replicas)
CASES: dict[str, tuple[dict[str, Any], str, int, int, int, int]] = {
    "qwen3-235b": (QWEN3_235B, "tp4pp8ep16etp1first11last11", 128, 8, 1, 16),
    "deepseek-v3": (DEEPSEEK_V3, "tp1pp16ep64first3last2", 1024, 16, 16, 32),
}


def measure(options: list[str]) -> dict[str, Any]:
    """Figures of both cases, `<case>_...`."""
    p = argparse.ArgumentParser("mcore-rl bench plan", description="Plans at scale, without weights.")
    p.add_argument("--case", choices=(*CASES, "all"), default="all")
    p.add_argument("--every", type=int, metavar="N", help="plan every N-th rank (default: one of every pipeline stage, and the last)")
    p.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # one rank, in a process of its own
    arguments = p.parse_args(options)
    if arguments.every is not None and arguments.every < 1:
        raise UserError(f"bench plan: --every is {arguments.every}; it must be at least 1")
    if arguments.rank is not None:
        return _one(arguments.case, arguments.rank)
    out: dict[str, Any] = {}
    for name in CASES if arguments.case == "all" else (arguments.case,):
        out.update({f"{name}_{key}": value for key, value in _case(name, arguments.every).items()})
    return out


def _parties(name: str) -> tuple[ModelConfig, McoreParty, TrtllmParty]:
    import torch

    config, layout, world, tp, ep, count = CASES[name]
    model = ModelConfig.from_hf(config)
    replicas = tuple(tuple(range(i * tp, (i + 1) * tp)) for i in range(count))
    return model, mcore_party(model, parallel_config(layout), world, torch.bfloat16), trtllm_party(model, replicas, torch.bfloat16, ep)


def _one(name: str, rank: int) -> dict[str, Any]:
    model, source, destination = _parties(name)
    started = time.perf_counter()
    plan = make_plan(source, destination, canonical_blocks(model), rank=rank)
    return {"rank": rank, "seconds": time.perf_counter() - started, "copies": len(plan.copies),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _case(name: str, every: int | None) -> dict[str, Any]:
    model, source, destination = _parties(name)
    world = len(source.ranks)
    stage = world // source.parallel.pp
    ranks = sorted({*range(0, world, every or stage), world - 1})
    root = Path(__file__).resolve().parents[1]
    runs = []
    for rank in track(ranks, description=name, transient=True):
        command = [sys.executable, "-m", "mcore_rl", "bench", "plan", "--json", "--case", name, "--rank", str(rank)]
        runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout.splitlines()[-1]))
    moved = traffic(source, destination, canonical_blocks(model))
    slowest = max(runs, key=lambda run: run["seconds"])
    return {"ranks": world, "engine_ranks": len(destination.ranks), "ranks_planned": len(ranks), "tensors": moved.tensors,
            "slowest_seconds": slowest["seconds"], "slowest_rank": slowest["rank"], "most_copies": max(run["copies"] for run in runs),
            "peak_rss_gb": max(run["peak_rss_bytes"] for run in runs) / 1e9, "bytes_needed_gb": moved.bytes_needed / 1e9,
            "local_gb": moved.local.total() / 1e9, "same_host_gb": moved.same_host.total() / 1e9, "remote_gb": moved.remote.total() / 1e9,
            "imbalance_within_stage": moved.imbalance([source.ranks[i:i + stage] for i in range(0, world, stage)]),
            "imbalance": moved.imbalance([source.ranks])}
