"""Rollout: tokens per second of the embedded engine, beside transformers' generate, the device's matrix products and vLLM.

    mcore-rl bench rollout --json
    mcore-rl bench rollout --model models/SmolLM2-135M-Instruct --prompts gsm8k.jsonl --limit 16 --samples 8 --max-tokens 128
    mcore-rl bench rollout ... --engines 2
    mcore-rl bench rollout ... --rival vllm --rival-python ~/vllm/bin/python
    mcore-rl bench rollout --model made-up-8b --limits --device cuda

One rank, temperature 1. Fixed lengths: no token ends a sample, every one is --max-tokens long. Ragged: the same samples, ended by stop ids
which are chosen such that lengths have a mean of 40/128 of --max-tokens; transformers computes its whole batch to the longest, which is the
fixed work again, so its ragged rate counts the useful tokens over that time. vLLM gets those lengths, a request a sample. The engine also returns log-probs, transformers is not
asked for them. The ceiling is one pass of the weights per generated token at the rate of a large product, prompts not counted.
`prefix_hit_rate` is the share of all samples' prompt tokens that were not computed, because a sample of the same prompt had been before.
`sleep_gives_back` is the share of the engine's resident memory that its sleep returns; `wake_sync_first_token_seconds` runs from there on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._ceiling import gemm_flops, weights_per_token
from benchmarks._engines import Engines, Setting
from benchmarks._generation_limits import limits
from benchmarks._made_up import named_shapes
from benchmarks._rival import check_rival, run_vllm
from benchmarks._rollout_work import (
    Ran,
    Transformers,
    Work,
    engine_for,
    fastest,
    from_files,
    made_up,
    phases_of,
    ragged_by_stop_ids,
    ragged_lengths,
    random_prompts,
    run_engine,
)
from benchmarks._sleep import resident, sleep_figures
from mcore_rl.prompts import read_prompts
from mcore_rl.tokens import load_tokenizer
from parallel.device import prepare_dtype, prepare_megatron, select_device
from parallel.environment import read_environment
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig
from trtllm_rollout.embedded.engine import EmbeddedEngine

Figures = dict[str, Any]


def measure(options: list[str]) -> Figures | None:
    """Tokens per second of engine, rivals and ceiling."""
    a = _options(options)
    if read_environment().world_size > 1:
        raise UserError("bench rollout measures one rank; start it as a plain process")
    check_rival(a.rival, a.rival_python)
    model = named_shapes(a.model) or ModelConfig.from_directory(a.model)
    device = select_device(a.device)
    prepare_megatron(device)
    dtype = torch_dtype(a.dtype or model.dtype)
    prepare_dtype(dtype, device)  # what it sets up for the device holds for all that is measured here
    torch.set_num_threads(a.threads)
    fill = made_up if named_shapes(a.model) else from_files(a.model, model)
    head = {"dtype": str(dtype).removeprefix("torch."), "device": device.type, "threads": a.threads}
    if a.limits:
        engine = engine_for(model, dtype, device.torch, a.batch, a.prompt_tokens + a.max_tokens, fill)
        found = limits(engine, model, dtype, device.torch, a.batch, a.max_tokens, a.prompt_tokens, a.repeat)
        return {**found, "batch": a.batch, "prompt_tokens": a.prompt_tokens, "max_tokens": a.max_tokens, **head}
    fixed = _work(a, model)
    if a.engines > 1:
        return {**_several(a, model, dtype, fixed), **head}
    batch = min(len(fixed.lengths), a.max_batch_size or len(fixed.lengths))
    gemm_flops(dtype, device.torch)  # what the libraries keep for themselves from here on is not the engine's
    before = resident(device.torch)
    engine = engine_for(model, dtype, device.torch, batch, fixed.longest_prompt + a.max_tokens, fill)
    figures, works = _engine_figures(partial(run_engine, engine), fixed, a)
    if a.profile:
        _profile(engine, fixed, device.torch)
    figures |= sleep_figures(engine, model, fixed, before, device.torch)
    figures |= _beside(figures, works, a, dtype, device.torch, model)
    return {**figures, "max_batch_size": batch, **head}


def _several(a: argparse.Namespace, model: ModelConfig, dtype: torch.dtype, fixed: Work) -> Figures:
    """As `measure`, of several engines that share the prompts; transformers' figure is that of its faster way: one process, or as many."""
    each = -(-len(fixed.prompts) // a.engines) * a.samples
    batch = min(each, a.max_batch_size or each)
    setting = Setting(a.model, dtype, batch, fixed.longest_prompt + a.max_tokens, max(1, a.threads // a.engines))
    with Engines(a.engines, setting) as engines:
        figures, works = _engine_figures(engines.run, fixed, a)
        apart = None
        if a.hf:
            engines.transformers(fixed.of(2))
            apart = fastest(f"transformers in {a.engines} processes", lambda: engines.transformers(fixed), fixed.tokens, a.repeat).seconds
    figures |= _beside(figures, works, a, dtype, torch.device("cpu"), model, apart)
    return {**figures, "engines": a.engines, "max_batch_size": batch}


def _work(a: argparse.Namespace, model: ModelConfig) -> Work:
    """What is generated at fixed lengths."""
    if a.prompts.isdecimal():
        prompts = random_prompts(int(a.prompts), a.prompt_tokens, model.vocab_size)
    else:
        prompts = tuple(p.ids for p in read_prompts(a.prompts, load_tokenizer(a.model), None, a.chat, None, a.limit))
    return Work(prompts, a.samples, (a.max_tokens,) * (len(prompts) * a.samples), separate=a.separate)


def _engine_figures(run: Callable[[Work], Ran], fixed: Work, a: argparse.Namespace) -> tuple[Figures, dict[str, Work]]:
    """The engine's own: `tokens_per_s` and so on, those of ragged lengths with `ragged_` before them. Also the work by kind of lengths."""
    run(fixed.of(2))
    figures: Figures = {}
    works = {"fixed": fixed}
    ran = fastest("embedded engine, fixed lengths", lambda: run(fixed), fixed.tokens, a.repeat)
    figures |= _figures("", ran, fixed)
    if a.ragged:
        ragged = Work(fixed.prompts, fixed.samples, ragged_lengths(len(fixed.lengths), a.max_tokens), separate=True) if a.separate else \
            ragged_by_stop_ids(fixed, ran.answers)
        works["ragged"] = ragged
        ran = fastest("embedded engine, ragged lengths", lambda: run(ragged), ragged.tokens, a.repeat)
        figures |= _figures("ragged_", ran, ragged)
        figures["ragged_of_fixed"] = figures["ragged_tokens_per_s"] / figures["tokens_per_s"]
        figures["ragged_mean"], figures["ragged_max"] = ran.tokens / len(ragged.lengths), max(map(len, ran.answers))
    return {**figures, "prompts": len(fixed.prompts), "samples": a.samples, "max_tokens": a.max_tokens,
            "prompt_tokens_mean": sum(map(len, fixed.prompts)) / len(fixed.prompts)}, works


def _figures(before: str, ran: Ran, work: Work) -> Figures:
    return {f"{before}tokens": ran.tokens, f"{before}seconds": ran.seconds, f"{before}tokens_per_s": ran.tokens / ran.seconds,
            f"{before}prefix_hit_rate": 1 - ran.stats["prefill_tokens"] / work.prompt_tokens, f"{before}phases": phases_of(ran.stats)}


def _before(kind: str) -> str:
    return "" if kind == "fixed" else "ragged_"


def _beside(figures: Figures, works: dict[str, Work], a: argparse.Namespace, dtype: torch.dtype, device: torch.device, model: ModelConfig,
            apart: float | None = None) -> Figures:
    """The rivals and the limit, in the same process and then in the rival's."""
    rate = gemm_flops(dtype, device)
    ceiling = rate / (2 * weights_per_token(model))
    out: Figures = {"gemm_gflops": rate / 1e9, "ceiling_tokens_per_s": ceiling, "of_ceiling": figures["tokens_per_s"] / ceiling}
    if a.hf and named_shapes(a.model) is None:
        out |= _transformers_figures(figures, works, a, dtype, device, apart)
    if a.rival:
        version, seconds = run_vllm(a.rival_python, a.model, str(dtype).removeprefix("torch."), a.threads, a.repeat, works)
        out["rival"] = f"vllm {version}"
        for kind, work in works.items():
            theirs = work.tokens / seconds[kind]
            out |= {f"{_before(kind)}rival_tokens_per_s": theirs,
                    f"{_before(kind)}times_rival": figures[f"{_before(kind)}tokens_per_s"] / theirs}
    return out


def _transformers_figures(figures: Figures, works: dict[str, Work], a: argparse.Namespace, dtype: torch.dtype, device: torch.device,
                          apart: float | None) -> Figures:
    """`apart`: its seconds in as many processes as there are engines, where they are several."""
    rival, fixed = Transformers(a.model, dtype, device), works["fixed"]
    rival.run(fixed.of(2))
    seconds = fastest("transformers", lambda: rival.run(fixed), fixed.tokens, a.repeat).seconds
    out: Figures = {"hf_seconds": seconds}
    if apart is not None:
        out |= {"hf_one_process_seconds": seconds, "hf_apart_seconds": apart, "hf_seconds": min(seconds, apart)}
        seconds = out["hf_seconds"]
    for kind in works:  # ragged lengths are computed to the longest: the same work, of which the tokens that the engine made are useful
        useful = figures[f"{_before(kind)}tokens"] / seconds
        out |= {f"{_before(kind)}hf_tokens_per_s": useful, f"{_before(kind)}times_hf": figures[f"{_before(kind)}tokens_per_s"] / useful}
    return out


def _profile(engine: EmbeddedEngine, work: Work, device: torch.device) -> None:
    """Print torch's operations by their own time, of a run of at most 16 tokens a sample; the profiler itself costs something."""
    from torch.profiler import ProfilerActivity, profile

    short = work.of(16)
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])], acc_events=True) as recorded:
        run_engine(engine, short)

    def own(event: Any) -> float:
        return float(event.self_device_time_total if cuda else event.self_cpu_time_total)

    events = sorted(recorded.key_averages(), key=own, reverse=True)
    total = sum(map(own, events)) or 1.0
    table = Table("operation", "calls", "ms", "share", title=f"torch's operations by own time, {short.tokens} tokens", title_justify="left")
    for event in events[:15]:
        table.add_row(event.key[:60], f"{event.count:,}", f"{own(event) / 1000:,.0f}", f"{own(event) / total:.1%}")
    Console().print(table)
    spent = phases_of(engine.stats())
    whole = max(sum(spent.values()), 1e-9)
    print("phases: " + ", ".join(f"{name} {seconds:.2f} s ({seconds / whole:.0%})" for name, seconds in spent.items()), flush=True)


def _options(options: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser("mcore-rl bench rollout", description="Measure generation.")
    p.add_argument("--model", metavar="DIR", default="models/SmolLM2-135M-Instruct",
                   help="Hugging Face model directory (default: models/SmolLM2-135M-Instruct, from mcore-rl fetch smollm2), or made-up-05b or "
                        "made-up-8b: a llama with random weights, without transformers beside it")
    p.add_argument("--prompts", default="8", metavar="FILE|N", help="prompts as `mcore-rl generate` reads them, or how many random ones (default 8)")
    p.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of FILE")
    p.add_argument("--chat", action="store_true", help="put prompts of FILE through the chat template")
    p.add_argument("--prompt-tokens", type=int, default=32, metavar="N", help="length of random prompts (default 32)")
    p.add_argument("--samples", type=int, default=4, metavar="N", help="responses per prompt (default 4)")
    p.add_argument("--max-tokens", type=int, default=32, metavar="N", help="tokens of the longest response (default 32)")
    p.add_argument("--lengths", choices=("fixed", "both"), default="both", help="fixed leaves ragged lengths out (default: both)")
    p.add_argument("--engines", type=int, default=1, metavar="N", help="so many engines in processes of their own, which share prompts and threads "
                   "as data-parallel ranks do; transformers is then measured both ways (CPU; default 1)")
    p.add_argument("--separate", action="store_true", help="every sample is a request of its own")
    p.add_argument("--max-batch-size", type=int, metavar="N", help="samples that the engine generates at once (default: all)")
    p.add_argument("--no-hf", dest="hf", action="store_false", help="leave transformers out")
    p.add_argument("--rival", choices=("vllm",), help="also run vLLM on the same work, after the others")
    p.add_argument("--rival-python", metavar="FILE", help="the Python interpreter that has it")
    p.add_argument("--profile", action="store_true", help="also print where the time goes, by operation")
    p.add_argument("--limits", action="store_true", help="instead: decoding beside the memory's bandwidth, prefill beside the products")
    p.add_argument("--batch", type=int, default=32, metavar="N", help="samples at once, for --limits (default 32)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: the model's")
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="CPU threads (default: all)")
    p.add_argument("--repeat", type=int, default=1, metavar="N", help="the fastest of N counts, after a short warm-up (default 1)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = p.parse_args(options)
    arguments.ragged = arguments.lengths == "both"
    for name in ("samples", "prompt_tokens", "max_tokens", "threads", "repeat", "batch", "limit", "max_batch_size", "engines"):
        value, least = getattr(arguments, name), 2 if name == "max_tokens" and arguments.limits else 1
        if value is not None and value < least:
            raise UserError(f"bench rollout: --{name.replace('_', '-')} is {value}; it must be at least {least}")
    if arguments.engines > 1 and (arguments.limits or arguments.profile or arguments.device == "cuda" or named_shapes(arguments.model)):
        raise UserError("bench rollout: --engines above 1 is for a model directory on the CPU, without --limits and --profile")
    if arguments.prompts == "0":
        raise UserError("bench rollout: --prompts is 0; it must be at least 1")
    if arguments.prompts.isdecimal() and (arguments.limit or arguments.chat):
        raise UserError("bench rollout: --limit and --chat are for prompts from a FILE")
    return arguments
