"""Step: seconds of each phase of a GRPO step, beside what the device's matrix products would allow.

    mcore-rl bench step --json
    mcore-rl bench step configs/grpo_smollm2_cpu.yaml rollout.max_tokens=64 rollout.stop_token_ids=[] --steps 3 \
        --rival trl --rival-python ~/trl/bin/python --json

A short real run of the configuration (without evaluation and checkpoints) in a temporary directory. The first step, which warms
caches up, is left out of the means. `ideal_*` counts 2 operations per weight and token in a forward pass and 6 in an update, at
the rate of one large matrix product with as many threads as the run uses. `--rival trl` then runs TRL's GRPOTrainer, in one process
with all threads, on the same model, prompts, group size, longest response, learning rate and type; responses end where each model
ends them, so `response_tokens` of both are given.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._ceiling import gemm_flops, weights_per_token
from benchmarks._rival import check_rival, run_trl
from launch.local import run_local
from mcore_rl.config import Config, load_config
from mcore_rl.config.sections import CheckpointConfig
from mcore_rl.outputs import read_metrics
from parallel.device import prepare_megatron, select_device
from parallel.environment import read_environment
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig

PHASES = ("rollout", "reward", "log_probs", "advantages", "update", "sync")


def measure(options: list[str]) -> dict[str, Any] | None:
    """Mean seconds of each phase, and the ideal ones."""
    a = _options(options)
    if read_environment().world_size > 1:
        raise UserError("bench step starts its own ranks; run it as a plain process with --ranks N")
    check_rival(a.rival, a.rival_python, "step", "trl")
    with tempfile.TemporaryDirectory() as work:
        config = _short(load_config(a.config, a.overrides, "train"), Path(work) / "run", a.steps)
        file = Path(work) / "config.yaml"
        file.write_text(config.to_yaml())
        if code := run_local(a.ranks, ["train", str(file)]):
            raise SystemExit(code)
        rows = read_metrics(config.run.dir)[1:]
        tokens = _tokens(Path(config.run.dir)) / (len(rows) + 1)
        prompts = _prompts(Path(config.run.dir))
    figures = _figures(config, rows, tokens, a.ranks)
    if a.rival:
        figures |= _trl(a.rival_python, config, prompts, a.rival_steps, a.ranks * _threads(config, a.ranks), figures)
    return figures


def _trl(python: str, config: Config, prompts: list[str], steps: int, threads: int, ours: dict[str, Any]) -> dict[str, Any]:
    """TRL's seconds of a step, its fastest, and how many times ours."""
    c = config
    found = run_trl(python, {
        "model": str(Path(c.model.path).resolve()), "dtype": c.model.dtype, "threads": threads, "steps": steps, "lr": c.actor.optimizer.lr,
        "prompts": prompts, "prompts_per_step": c.rollout.prompts_per_step, "samples": c.rollout.samples_per_prompt,
        "max_tokens": c.rollout.max_tokens, "micro_batch": c.actor.micro_batch_size, "device": ours["device"]})
    best = min(range(len(found["seconds"])), key=found["seconds"].__getitem__)
    seconds, tokens = found["seconds"][best], found["tokens"][best]
    return {"rival": f"trl {found['version']}", "trl_step_s": seconds, "trl_response_tokens": float(tokens), "times_trl": seconds / ours["step_s"],
            "times_trl_per_response_token": seconds / tokens / (ours["step_s"] / ours["response_tokens"])}


def _options(options: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser("mcore-rl bench step", description="Measure the phases of a GRPO step.")
    p.add_argument("config", nargs="?", default="configs/demo_cpu.yaml", help="YAML configuration (default: configs/demo_cpu.yaml)")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the file")
    p.add_argument("--steps", type=int, default=5, metavar="N", help="steps to run; the first is not counted (default 5)")
    p.add_argument("--rival", choices=("trl",), help="also run a step of TRL's GRPOTrainer on the same work, after ours")
    p.add_argument("--rival-python", metavar="FILE", help="the Python interpreter that has it")
    p.add_argument("--rival-steps", type=int, default=2, metavar="N", help="steps of the rival, of which the fastest counts (default 2)")
    p.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default 2)")
    arguments = p.parse_intermixed_args(options)
    if arguments.steps < 2 or arguments.ranks < 1 or arguments.rival_steps < 1:
        raise UserError(f"bench step: --steps {arguments.steps} must be at least 2, --ranks {arguments.ranks} and --rival-steps "
                        f"{arguments.rival_steps} at least 1")
    return arguments


def _short(config: Config, directory: Path, steps: int) -> Config:
    """The configuration as a short run that only trains, and stores all samples to count their tokens."""
    c = config
    optimizer = c.actor.optimizer
    if optimizer.schedule != "constant":  # as in the whole run
        optimizer = replace(optimizer, decay_steps=optimizer.decay_steps or c.total_updates)
    return replace(c, actor=replace(c.actor, optimizer=optimizer), run=replace(c.run, dir=str(directory), steps=steps), checkpoint=CheckpointConfig(),
                   evaluation=replace(c.evaluation, every=0),
                   log=replace(c.log, plots=False, tensorboard=False, wandb=False,
                               samples_per_step=c.rollout.prompts_per_step * c.rollout.samples_per_prompt))


def _tokens(directory: Path) -> float:
    """Tokens of all samples of all steps, prompts included."""
    return float(sum(len(json.loads(line)["tokens"]) for file in (directory / "samples").glob("step_*.jsonl")
                     for line in file.read_text().splitlines()))


def _prompts(directory: Path) -> list[str]:
    """The prompts of all steps, in order, each once."""
    rows = [json.loads(line) for file in sorted((directory / "samples").glob("step_*.jsonl")) for line in file.read_text().splitlines()]
    return [row["prompt"] for row in rows if row["index"] == 0]


def _threads(config: Config, ranks: int) -> int:
    return config.run.threads or max(1, (os.cpu_count() or 1) // ranks)


def _figures(config: Config, rows: list[dict[str, Any]], tokens: float, ranks: int) -> dict[str, Any]:
    device = select_device(config.run.device)
    prepare_megatron(device)  # as the ranks did
    torch.set_num_threads(ranks * _threads(config, ranks))
    rate = gemm_flops(torch_dtype(config.model.dtype), device.torch) * (ranks if device.type == "cuda" else 1)
    weights = weights_per_token(ModelConfig.from_directory(config.model.path))
    mean = {name: sum(r[f"time/{name}_s"] for r in rows) / len(rows) for name in (*PHASES, "step")}
    forward = 2 * weights * tokens / rate
    phases = {name: mean[name] for name in PHASES}
    phases["other"] = mean["step"] - sum(phases.values())
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    figures: dict[str, Any] = {"step_s": mean["step"], "phases": phases, **{f"{name}_s": seconds for name, seconds in phases.items()}}
    figures["response_tokens"] = samples * sum(r["response/length_mean"] for r in rows) / len(rows)
    figures |= {"ideal_log_probs_s": forward, "ideal_update_s": 3 * forward, "update_of_ideal": 3 * forward / mean["update"],
                "gemm_gflops": rate / 1e9, "tokens_per_step": tokens, "tokens_per_s": tokens / mean["step"],
                "sync_bytes": float(rows[-1]["sync/bytes"]), "steps": float(len(rows)), "ranks": float(ranks),
                "dtype": config.model.dtype, "device": device.type}
    return figures
