"""`mcore-rl generate MODEL --prompts FILE`"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from launch.local import run_local
from mcore_rl.cli import command
from mcore_rl.models import open_engine
from mcore_rl.prompts import Prompt, read_prompts
from mcore_rl.run import World, joined, stop_ids
from parallel.environment import read_environment
from parallel.errors import UserError
from trtllm_rollout.protocol import Completion, Request, SamplingParams

SAID_EVERY = 10.0  # seconds between lines of progress where there is no terminal


def add(commands: Any) -> None:
    p = command(commands, "generate", "Generate responses to prompts and write them as JSONL.",
                "mcore-rl generate models/demo-warm --prompts prompts.jsonl --samples 2 --max-tokens 16 --out responses.jsonl",
                "FILE holds JSON objects, one a line, with `prompt` (or `question`, or `problem`) as text or as a list of chat messages; or is .txt,\n"
                "one prompt a line. Each output line is an object with prompt, response, token_ids, log_probs (of the sampled tokens at the\n"
                "sampling temperature), finish_reason and stop_reason. --log-probs adds raw_log_probs and top_log_probs ([id, log-prob] pairs),\n"
                "--prompt-log-probs adds prompt_token_ids and prompt_log_probs (from the second token on).")
    p.add_argument("model", help="hf:DIR (or DIR), or mcore:DIR: a converted model, a run's checkpoint, a directory of Megatron-LM or Megatron-Bridge")
    p.add_argument("--prompts", required=True, metavar="FILE", help="JSONL, parquet or .txt file of prompts")
    p.add_argument("--prompt-field", metavar="NAME", help="the field with the prompt (default: prompt, question or problem, the first there is)")
    p.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    p.add_argument("--chat", action="store_true", help="put text prompts through the chat template, as the user's turn")
    p.add_argument("--system", metavar="TEXT", help="the system's turn before it")
    p.add_argument("--samples", type=int, default=1, metavar="N", help="responses per prompt (default 1)")
    p.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest response in tokens (default 256)")
    p.add_argument("--min-tokens", type=int, default=0, metavar="N", help="nothing ends a response before so many tokens (default 0)")
    p.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default 1.0)")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all (default)")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: all (default)")
    p.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop tokens less likely than P times the likeliest; 0: none (default)")
    p.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="of tokens in prompt and answer; 1: none (default)")
    p.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="of tokens in the answer; 0: none (default)")
    p.add_argument("--stop", action="append", default=[], metavar="STRING", help="end a response where its text holds STRING (repeatable)")
    p.add_argument("--log-probs", type=int, metavar="N", help="also write raw log-probs, and the N likeliest tokens of every position")
    p.add_argument("--prompt-log-probs", action="store_true", help="also write the log-probs of the prompt's tokens")
    p.add_argument("--seed", type=int, default=0, help="of the random streams (default 0)")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size of the engine; a plain process starts N ranks (default 1)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the engine's weights (default: the model's)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--hf-config", metavar="DIR", help="where config.json and the tokenizer are, for a Megatron checkpoint without them")
    p.add_argument("--out", metavar="FILE", help="output file (default: standard output)")


def execute(arguments: argparse.Namespace) -> int:
    sampling = _sampling(arguments)
    if arguments.tp > 1 and read_environment().world_size == 1:
        return run_local(arguments.tp, sys.argv[1:])
    with joined(arguments.device) as world:
        _generate(arguments, sampling, world)
    return 0


def _sampling(a: argparse.Namespace) -> SamplingParams:
    """All that can be refused before a model is read."""
    for name, least in (("samples", 1), ("tp", 1), ("limit", 1), ("log_probs", 0), ("seed", 0)):
        value = getattr(a, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if a.system is not None and not a.chat:
        raise UserError("--system says nothing without --chat; add it, or put the system's turn into the messages of FILE")
    if a.out and (Path(a.out).is_dir() or not Path(a.out).absolute().parent.is_dir()):
        raise UserError(f"--out {a.out!r} cannot be written: it is a directory, or its folder does not exist")
    return SamplingParams(a.temperature, a.top_k, a.top_p, a.max_tokens, (), a.min_p, a.repetition_penalty, a.presence_penalty, a.min_tokens,
                          tuple(a.stop), a.log_probs or 0, a.prompt_log_probs)


def _generate(arguments: argparse.Namespace, sampling: SamplingParams, world: World) -> None:
    rollout, model, tokenizer = open_engine(arguments.model, world, arguments.tp, arguments.dtype, hf_config=arguments.hf_config)
    sampling = replace(sampling, stop_token_ids=tuple(sorted(stop_ids(model, tokenizer))))
    prompts = read_prompts(arguments.prompts, tokenizer, arguments.prompt_field, arguments.chat, arguments.system, arguments.limit)
    requests = [Request(i, p.ids, sampling, arguments.samples, (arguments.seed, 0, i)) for i, p in enumerate(prompts)]
    mine = len(requests[rollout.replica::rollout.replicas]) * arguments.samples
    started = time.perf_counter()
    with _progress(mine, world.rank == 0) as report:
        done = rollout.generate(requests, report)
    if world.rank != 0:
        return
    seconds = time.perf_counter() - started
    with open(arguments.out, "w", encoding="utf-8") if arguments.out else contextlib.nullcontext(sys.stdout) as out:
        for d in done:
            out.write(json.dumps(_line(arguments, tokenizer, prompts[d.request_id], d), ensure_ascii=False) + "\n")
    if arguments.out:
        tokens = sum(len(d.token_ids) for d in done)
        print(f"{len(done)} responses to {len(prompts)} prompts written to {arguments.out} ({tokens} tokens in {seconds:.1f} s, "
              f"{tokens / seconds:.0f} tokens/s)", file=sys.stderr)


def _line(arguments: argparse.Namespace, tokenizer: Any, prompt: Prompt, done: Completion) -> dict[str, Any]:
    """One response as it is written."""
    line = {"prompt": prompt.text, "response": tokenizer.decode(done.token_ids, skip_special_tokens=True), "token_ids": list(done.token_ids),
            "log_probs": list(done.log_probs), "finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
    if arguments.log_probs is not None:
        line |= {"raw_log_probs": list(done.raw_log_probs), "top_log_probs": [[list(pair) for pair in top] for top in done.top_log_probs]}
    if arguments.prompt_log_probs:
        line |= {"prompt_token_ids": list(prompt.ids), "prompt_log_probs": list(done.prompt_log_probs)}
    return line


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[Completion], None]]:
    """Responses that are done, of this rank's engine: a bar on a terminal; elsewhere a line now and then."""
    console = Console(stderr=True, highlight=False)
    count = tokens = 0
    started = last = time.monotonic()
    bar = Progress(TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]} tokens/s"), TimeRemainingColumn(),
                   console=console, transient=True)

    def report(done: Completion) -> None:
        nonlocal count, tokens, last
        count, tokens = count + 1, tokens + len(done.token_ids)
        rate = f"{tokens / max(time.monotonic() - started, 1e-9):,.0f}"
        if console.is_terminal:
            bar.update(task, completed=count, rate=rate)
        elif time.monotonic() - last >= SAID_EVERY:
            last = time.monotonic()
            console.print(f"generating: {count} of {total} responses, {tokens} tokens, {rate} tokens/s", markup=False)

    if not shown:
        yield lambda done: None
        return
    with bar if console.is_terminal else contextlib.nullcontext():
        task = bar.add_task("generating", total=total, rate="0")
        yield report
