"""`mcore-rl evaluate MODEL CONFIG [key=value ...]`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_rl.cli import command, set_up_logging
from mcore_rl.commands.train import held_out_rows
from mcore_rl.config import load_config
from mcore_rl.data import PromptStream
from mcore_rl.evaluation import measure
from mcore_rl.models import open_engine
from mcore_rl.rewards import make_reward
from mcore_rl.run import Run, joined


def add(commands: Any) -> None:
    p = command(commands, "evaluate", "Measure a model on the held-out prompts of a configuration.",
                "mcore-rl evaluate models/demo-warm configs/demo_cpu.yaml rollout.tp=1 evaluation.max_prompts=100")
    p.add_argument("model", help="Hugging Face model directory (hf:DIR) or Megatron checkpoint (mcore:DIR)")
    p.add_argument("config", help="YAML configuration file; its sections data, reward, evaluation and rollout are used")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the file")


def execute(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, [f"model.path={arguments.model}", *arguments.overrides], "evaluate")
    set_up_logging(config.log.level)
    with joined(config.run.device, config.run.threads) as world:
        rollout, model, tokenizer = open_engine(arguments.model, world, config.rollout.tp, config.rollout.dtype or config.model.dtype,
                                                config.rollout.max_batch_size, driver=config.rollout.driver, temperature=config.rollout.temperature,
                                                moe_ep=config.rollout.moe_ep, fp8=config.rollout.fp8,
                                                **({} if config.rollout.driver is not None else {"fp8_rows": config.fp8_rows}))
        run = Run(config, world, model, tokenizer, [], PromptStream(1, 0, 1), Path(config.run.dir), rollout=rollout, reward=make_reward(config.reward))
        run.held_out = held_out_rows(config, tokenizer, world)
        results = measure(run)
        results.pop("answers")
        if world.rank == 0:
            _show(arguments.model, results)
    return 0


def _show(model: str, results: dict[str, float]) -> None:
    table = Table(title=f"{model} on held-out prompts", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for key, value in results.items():
        table.add_row(f"eval/{key}", f"{value:.4g}")
    Console().print(table)
    print(json.dumps({f"eval/{k}": v for k, v in results.items()}), flush=True)
