"""`mcore-rl generate MODEL --prompts FILE`"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from launch.local import run_local
from mcore_rl.cli import command
from mcore_rl.config import DataConfig
from mcore_rl.models import open_engine
from mcore_rl.readers import BadRow, read_rows
from mcore_rl.run import World, joined, stop_ids
from mcore_rl.tokens import encode_prompt, load_tokenizer
from parallel.environment import read_environment
from parallel.errors import UserError
from trtllm_rollout.protocol import Request, SamplingParams


def add(commands: Any) -> None:
    p = command(commands, "generate", "Generate responses to prompts and write them as JSONL.",
                "mcore-rl generate models/demo-warm --prompts prompts.jsonl --samples 2 --max-tokens 16 --out responses.jsonl",
                "FILE holds JSON objects, one a line, with `prompt` as text or as a list of chat messages. Each output line is an object\n"
                "with prompt, response, token_ids, log_probs (of the sampled tokens at the sampling temperature) and finish_reason.")
    p.add_argument("model", help="hf:DIR (or DIR), or mcore:DIR")
    p.add_argument("--prompts", required=True, metavar="FILE", help="JSONL or parquet file of prompts")
    p.add_argument("--samples", type=int, default=1, metavar="N", help="responses per prompt (default 1)")
    p.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest response in tokens (default 256)")
    p.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default 1.0)")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all (default)")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: all (default)")
    p.add_argument("--seed", type=int, default=0, help="of the random streams (default 0)")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size of the engine; a plain process starts N ranks (default 1)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the engine's weights (default: the model's)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--out", metavar="FILE", help="output file (default: standard output)")


def execute(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.tp > 1 and read_environment().world_size == 1:
        return run_local(arguments.tp, sys.argv[1:])
    sampling = SamplingParams(arguments.temperature, arguments.top_k, arguments.top_p, arguments.max_tokens)
    with joined(arguments.device) as world:
        _generate(arguments, sampling, world)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name in ("samples", "tp"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    if arguments.out and (Path(arguments.out).is_dir() or not Path(arguments.out).absolute().parent.is_dir()):
        raise UserError(f"--out {arguments.out!r} cannot be written: it is a directory, or its folder does not exist")


def _generate(arguments: argparse.Namespace, sampling: SamplingParams, world: World) -> None:
    raw = list(read_rows(arguments.prompts))
    rollout, model, hf_directory = open_engine(arguments.model, world, arguments.tp, arguments.dtype)
    tokenizer = load_tokenizer(hf_directory)
    stops = tuple(sorted(stop_ids(model, tokenizer)))
    sampling = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens, stops)
    prompts = [_encode(tokenizer, arguments.prompts, i, row) for i, row in enumerate(raw)]
    if not prompts:
        raise UserError(f"--prompts {arguments.prompts}: no prompts; give one JSON object a line with a field prompt")
    done = rollout.generate([Request(i, ids, sampling, arguments.samples, (arguments.seed, 0, i)) for i, ids in enumerate(prompts)])
    if world.rank != 0:
        return
    out = open(arguments.out, "w") if arguments.out else sys.stdout
    for d in done:
        out.write(json.dumps({"prompt": raw[d.request_id]["prompt"], "response": tokenizer.decode(d.token_ids, skip_special_tokens=True),
                              "token_ids": list(d.token_ids), "log_probs": list(d.log_probs), "finish_reason": d.finish_reason},
                             ensure_ascii=False) + "\n")
    if arguments.out:
        out.close()
        stats = rollout.engine.stats()
        print(f"{len(done)} responses to {len(prompts)} prompts written to {arguments.out} "
              f"({stats.get('tokens_per_second', 0.0):.0f} tokens/s on this rank's engine)", file=sys.stderr)


def _encode(tokenizer: Any, file: str, index: int, row: Any) -> tuple[int, ...]:
    try:
        if isinstance(row, BadRow):
            raise row
        form = "chat" if isinstance(row.get("prompt"), list) else "text"
        return tuple(encode_prompt(tokenizer, DataConfig(train=file, prompt_format=form), row)[1])
    except BadRow as error:
        raise UserError(f"--prompts {file} row {index}: {error}") from None
