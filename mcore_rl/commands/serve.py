"""`mcore-rl serve MODEL`"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launch.local import run_local
from mcore_rl.cli import command
from mcore_rl.models import open_engine, parse_model
from mcore_rl.run import World, joined, stop_ids
from mcore_rl.server.asked import Serving
from mcore_rl.server.server import Server, check_address, libraries
from mcore_rl.server.worker import follow
from parallel.environment import read_environment
from parallel.errors import UserError

KEY = "MCORE_RL_API_KEY"
BLOCK = 32  # tokens of a block of the KV cache


def add(commands: Any) -> None:
    p = command(commands, "serve", "Serve a model as OpenAI's /v1/completions and /v1/chat/completions.",
                "mcore-rl serve models/demo-warm --port 8000",
                "Requests of all clients share one batch. Binding to anything but a loopback address requires a key, from the environment variable\n"
                f"{KEY} or --api-key. SIGTERM and Ctrl-C let running answers end. docs/serving.md has examples.")
    p.add_argument("model", help="hf:DIR (or DIR), or mcore:DIR: a converted model, a run's checkpoint, a directory of Megatron-LM or Megatron-Bridge")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, metavar="N", help="0: any that is free (default 8000)")
    p.add_argument("--api-key", metavar="KEY", help=f"clients must send it (default: the environment's {KEY}, which other users do not see)")
    p.add_argument("--name", help="what clients call the model (default: the directory's name)")
    p.add_argument("--max-batch-size", type=int, default=256, metavar="N", help="samples that are generated at once (default 256)")
    p.add_argument("--max-seq-len", type=int, metavar="N", help="most tokens of prompt and answer (default: the model's max_position_embeddings)")
    p.add_argument("--kv-cache-gb", type=float, metavar="GB", help="memory for keys and values (default: the largest batch's need, or a share of what is free)")
    p.add_argument("--hf-config", metavar="DIR", help="where config.json and the tokenizer are, for a Megatron checkpoint without them")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size of the engine; a plain process starts N ranks (default 1)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the engine's weights (default: the model's)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def execute(arguments: argparse.Namespace) -> int:
    key = arguments.api_key or os.environ.get(KEY) or None
    check_address(arguments.host, arguments.port, key)
    libraries()
    for option in ("tp", "max_batch_size"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} is {getattr(arguments, option)}; it must be at least 1")
    if arguments.kv_cache_gb is not None and not 0 < arguments.kv_cache_gb < math.inf:
        raise UserError(f"--kv-cache-gb is {arguments.kv_cache_gb}; it must be more than 0, and finite")
    ranks = read_environment().world_size
    if arguments.tp > 1 and ranks == 1:
        return run_local(arguments.tp, sys.argv[1:])
    if ranks != arguments.tp:
        raise UserError(f"serve runs one engine over all ranks: --tp is {arguments.tp}, but {ranks} ranks were started")
    with joined(arguments.device) as world:
        _serve(arguments, key, world)
    return 0


def _serve(arguments: argparse.Namespace, key: str | None, world: World) -> None:
    rollout, model, tokenizer = open_engine(
        arguments.model, world, arguments.tp, arguments.dtype, arguments.max_batch_size, arguments.hf_config, max_seq_len=arguments.max_seq_len,
        block_size=BLOCK, kv_cache_bytes=None if arguments.kv_cache_gb is None else int(arguments.kv_cache_gb * 1e9))
    group = dist.group.WORLD if world.size > 1 else None
    if world.rank:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the launcher tells all ranks; the first one ends the others when its answers are done
        follow(rollout.engine, group)
        return
    name = arguments.name or Path(os.path.abspath(parse_model(arguments.model)[1])).name
    held = (int(rollout.engine.stats()["kv_blocks_total"]) - 1) * BLOCK  # of one request alone: prompt and answer begin a block each
    serving = Serving(name, tokenizer, min(held, arguments.max_seq_len or model.max_position_embeddings), tuple(sorted(stop_ids(model, tokenizer))))
    server = Server(rollout.engine, serving, arguments.host, arguments.port, key, group)
    server.run(lambda: print(f"{name} is served at {server.url}" + (" (with a key)" if key else ""), flush=True))
