"""`mcore-rl sft CONFIG [key=value ...]`"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpoint.hf import check_writable
from mcore_rl.cli import command, set_up_logging
from mcore_rl.config import Config, describe, load_config
from mcore_rl.data import PromptStream, SftExample, sft_examples
from mcore_rl.progress import Progress
from mcore_rl.record import Recorder
from mcore_rl.run import Run, World, batching_options, check_frozen, joined, make_policy, optimizer_options, take_directory, training_options
from mcore_rl.scratch import make_from_scratch
from mcore_rl.sft import train_supervised
from mcore_rl.tokens import load_tokenizer
from parallel.errors import UserError
from parallel.model_config import ModelConfig


def add(commands: Any) -> None:
    p = command(commands, "sft", "Fine-tune a model on prompt/response rows and write it as a Hugging Face directory.",
                "torchrun --nproc-per-node 2 -m mcore_rl sft configs/demo_warm_up.yaml sft.steps=100",
                "configuration keys:\n" + describe("sft").replace("%", "%%"))
    p.add_argument("config", help="YAML configuration file")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the file")


def execute(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides, "sft")
    set_up_logging(config.log.level)
    with joined(config.run.device, config.run.threads) as world:
        run_sft(config, world)
    return 0


def run_sft(config: Config, world: World) -> None:
    """The whole run, in a world that is already joined."""
    assert config.sft is not None
    check_writable(config.sft.output, overwrite=True)
    ensure_scratch_model(config, world)
    directory, lease = take_directory(config)
    with lease:
        model = ModelConfig.from_directory(config.model.path, make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by)
        config.actor.parallel.validate(world.size, model)
        tokenizer = load_tokenizer(config.model.path)
        examples, report = sft_examples(config.data, tokenizer, max_sequence_tokens=config.sft.max_sequence_tokens)
        if world.rank == 0:
            print(report.text(), flush=True)
        _check_examples(examples, model)
        prompts = PromptStream(len(examples), config.run.seed, config.sft.batch_size, config.data.shuffle, report.fingerprint)
        run = Run(config, world, model, tokenizer, [], prompts, directory, lease=lease)
        check_frozen(config, model)
        run.actor = make_policy(world, model, config.actor.parallel, config.model.dtype, config.run.seed, config.model.path,
                                optimizer_options(config), config.actor.layer_implementation, batching=batching_options(config.actor),
                                options=training_options(config))
        progress = Progress(config.sft.steps, title="sft") if world.rank == 0 else None
        if progress is not None:
            run.on_phase = progress.phase
        recorder = Recorder(run, progress)
        recorder.resume(run)
        try:
            with progress or contextlib.nullcontext():
                train_supervised(run, examples, recorder)
        finally:
            recorder.close()
    if world.rank == 0:
        print(f"model written to {config.sft.output}", flush=True)


def _check_examples(examples: list[SftExample], model: ModelConfig) -> None:
    """Refuse token ids and lengths that the model does not have."""
    for e in examples:
        if max(e.token_ids) >= model.vocab_size:
            raise UserError(f"row {e.index} has token id {max(e.token_ids)}, the model has a vocabulary of {model.vocab_size}; "
                            "tokenizer and model do not belong together")
        if len(e.token_ids) > model.max_position_embeddings:
            raise UserError(f"row {e.index} has {len(e.token_ids)} tokens, the model has {model.max_position_embeddings} positions; "
                            "set sft.max_sequence_tokens to drop longer rows")


def ensure_scratch_model(config: Config, world: World) -> None:
    """Make the model of `model.init` where model.path is missing."""
    if config.model.init is None or Path(config.model.path, "config.json").is_file():
        return
    if world.rank == 0:
        print(f"model {config.model.path} is missing: making it from scratch (model.init)", flush=True)
        make_from_scratch(config.model.init, config.model.path, config.run.seed)
    if dist.is_initialized():
        dist.barrier()
