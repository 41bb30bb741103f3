"""`mcore-rl train CONFIG [key=value ...]`"""

from __future__ import annotations

import argparse
import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.value_head import value_model
from mcore_rl.cli import command, set_up_logging
from mcore_rl.commands.sft import ensure_scratch_model, run_sft
from mcore_rl.config import Config, describe, load_config
from mcore_rl.data import PromptStream, load_rows
from mcore_rl.evaluation import read_answers
from mcore_rl.loop import train
from mcore_rl.progress import Progress, print_summary
from mcore_rl.record import Recorder
from mcore_rl.rewards import check_answers, make_reward
from mcore_rl.rollout import check_engine_size, check_engine_world
from mcore_rl.run import (
    Run,
    World,
    batching_options,
    check_frozen,
    joined,
    make_critic,
    make_policy,
    make_rollout,
    optimizer_options,
    refuse_value_model,
    take_directory,
    training_options,
)
from mcore_rl.tokens import load_tokenizer
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.options import TrainingOptions

logger = logging.getLogger(__name__)


def add(commands: Any) -> None:
    p = command(commands, "train", "Train a policy with reinforcement learning; continues a run whose directory holds a checkpoint.",
                "torchrun --nproc-per-node 2 -m mcore_rl train configs/demo_cpu.yaml run.steps=20 actor.optimizer.lr=1e-5",
                "configuration keys:\n" + describe("train").replace("%", "%%"))
    p.add_argument("config", help="YAML configuration file")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the file")


def execute(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides, "train")
    set_up_logging(config.log.level)
    with joined(config.run.device, config.run.threads) as world:
        config = replace(config, run=replace(config.run, threads=torch.get_num_threads()))
        config.actor.parallel.validate_world(world.size)
        check_engine_world(config.rollout.tp, world.size, config.rollout.driver)
        _make_missing_model(config, world)
        directory, lease = take_directory(config)
        with lease:
            run = open_run(config, world, directory)
            run.lease = lease
            _train(run, arguments)
    return 0


def _train(run: Run, arguments: argparse.Namespace) -> None:
    progress = Progress(run.config.run.steps) if run.rank == 0 else None
    recorder = Recorder(run, progress)
    recorder.resume(run)
    try:
        if progress is None:
            train(run, recorder)
        else:
            progress.done = run.step
            run.on_phase = progress.phase
            with progress:
                train(run, recorder)
    finally:
        recorder.close()
    if run.rank == 0:
        print_summary(run.directory, _continuation(run, arguments), *_few(*read_answers(run.directory)))


_START = {"torchrun": "torchrun --nproc-per-node {n} -m mcore_rl", "plain": "mcore-rl", "mpirun": "mpirun -n {n} python -m mcore_rl",
          "srun": "srun -n {n} python -m mcore_rl"}


def _continuation(run: Run, arguments: argparse.Namespace) -> str:
    """The command that goes on from here, under the launcher of this run."""
    more = run.config.run.steps + max(10, run.config.run.steps // 2)
    overrides = [o for o in arguments.overrides if not o.startswith("run.steps=")]
    start = _START.get(run.world.environment.launcher, _START["torchrun"]).format(n=run.world_size)
    return f"{start} {shlex.join(['train', arguments.config, *overrides, f'run.steps={more}'])}"


def _few(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A few answers that changed, then others."""
    order = sorted(range(len(before)), key=lambda i: before[i]["response"] == after[i]["response"])[:8]
    return [before[i] for i in order], [after[i] for i in order]


def _make_missing_model(config: Config, world: World) -> None:
    """Make model.path where it is missing and the configuration says how."""
    missing = not Path(config.model.path, "config.json").is_file()
    if config.warm_up is None or not missing:
        ensure_scratch_model(config, world)
        return
    warm_up = load_config(config.warm_up.config, [], "sft")
    assert warm_up.sft is not None
    if Path(warm_up.sft.output) != Path(config.model.path):
        raise UserError(f"model.path {config.model.path!r} is missing and warm_up.config {config.warm_up.config!r} writes {warm_up.sft.output!r}; "
                        "make sft.output and model.path the same")
    if world.rank == 0:
        print(f"model {config.model.path} is missing: making it first, by supervised warm-up from {config.warm_up.config}", flush=True)
    run_sft(replace(warm_up, run=replace(warm_up.run, threads=config.run.threads)), world)
    if dist.is_initialized():
        dist.barrier()


def open_run(config: Config, world: World, directory: Path) -> Run:
    """Check everything that can be checked without weights, then build the roles. Raises UserError."""
    model = ModelConfig.from_directory(config.model.path, make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by)
    config.actor.parallel.validate(world.size, model)
    refuse_value_model(model, "actor", config.model.path)
    if config.rollout.replay is None or config.evaluation.every:
        check_engine_size(config.rollout.tp, world.size, model, config.rollout.driver, world.device, config.rollout.moe_ep,
                          config.rollout.fp8)
    tokenizer = load_tokenizer(config.model.path)
    rows, report = load_rows(config.data, tokenizer)
    check_answers(config.reward, rows)
    prompts = PromptStream(len(rows), config.run.seed, config.rollout.prompts_per_step, config.data.shuffle, report.fingerprint)
    run = Run(config, world, model, tokenizer, rows, prompts, directory, reward=make_reward(config.reward))
    if world.rank == 0:
        print(report.text(), flush=True)
    if config.evaluation.data is not None:
        run.held_out = held_out_rows(config, tokenizer, world)
    _check_lengths(run)
    _build_roles(run)
    return run


def held_out_rows(config: Config, tokenizer: Any, world: World) -> list[Any]:
    """Evaluation prompts, the first `evaluation.max_prompts` of them."""
    assert config.evaluation.data is not None
    rows, report = load_rows(config.data, tokenizer, config.evaluation.data)
    check_answers(config.reward, rows)
    if world.rank == 0:
        print(report.text(), flush=True)
    return rows[:config.evaluation.max_prompts]


def _check_lengths(run: Run) -> None:
    longest = max(len(r.prompt_ids) for r in [*run.rows, *run.held_out])
    limit = run.model.max_position_embeddings
    if longest + run.config.rollout.max_tokens > limit:
        raise UserError(f"rollout.max_tokens {run.config.rollout.max_tokens} and the longest prompt of {longest} tokens exceed the model's "
                        f"{limit} positions; lower rollout.max_tokens or data.max_prompt_tokens")


def _check_reads_the_same(actor: ModelConfig, actor_path: str, model: ModelConfig, role: str, path: str) -> None:
    for name in ("vocab_size", "max_position_embeddings"):
        if getattr(model, name) < getattr(actor, name) or (name == "vocab_size" and model.vocab_size != actor.vocab_size):
            raise UserError(f"{role}.path {path!r} has {name} {getattr(model, name)}, model.path {actor_path!r} has {getattr(actor, name)}; "
                            f"the {role} must read the same tokens: choose a model of the same tokenizer and length")


def _build_roles(run: Run) -> None:
    c = run.config
    check_frozen(c, run.model)
    run.actor = make_policy(run.world, run.model, c.actor.parallel, c.model.dtype, c.run.seed, c.model.path,
                            optimizer_options(c), c.actor.layer_implementation, batching=batching_options(c.actor), options=training_options(c))
    if c.algorithm.kl_coefficient > 0:
        path = c.reference.path or c.model.path
        model = ModelConfig.from_directory(path, make_vocab_size_divisible_by=c.model.make_vocab_size_divisible_by)
        _check_reads_the_same(run.model, c.model.path, model, "reference", path)
        run.reference = make_policy(run.world, model, c.reference.parallel or c.actor.parallel, c.model.dtype, c.run.seed, path,
                                    None, c.actor.layer_implementation, "reference", batching_options(c.actor), TrainingOptions(fp8=c.actor.fp8))
    if c.has_critic and c.run.only is None:
        path = c.critic.path or c.model.path
        model, holds_head = value_model(path, make_vocab_size_divisible_by=c.model.make_vocab_size_divisible_by)
        _check_reads_the_same(run.model, c.model.path, model, "critic", path)
        run.critic = make_critic(run.world, c, model, holds_head, path)
    if c.rollout.replay is None or c.evaluation.every:
        run.rollout = make_rollout(run.world, run.model, c)
