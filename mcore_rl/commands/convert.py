"""`mcore-rl convert SRC DST`: between Hugging Face directories and Megatron checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from checkpoint.hf import check_writable, export_hf
from checkpoint.mcore import load_model, model_config_of, save_model
from launch.local import run_local
from mcore_rl.cli import command
from mcore_rl.models import parse_model
from mcore_rl.run import World, joined, load_weights
from parallel.config import ParallelConfig
from parallel.environment import read_environment
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from parallel.training import build
from resharding.layouts import mcore_layout


def add(commands: Any) -> None:
    p = command(commands, "convert", "Convert a model between a Hugging Face directory (hf:DIR) and a Megatron checkpoint (mcore:DIR).",
                "mcore-rl convert hf:models/demo-warm mcore:models/demo-warm-mcore --tp 2",
                "The Megatron checkpoint can be read under any layout; the sizes set how it is cut into files and the vocabulary padding.")
    p.add_argument("source", metavar="SRC", help="hf:DIR or mcore:DIR")
    p.add_argument("destination", metavar="DST", help="mcore:DIR or hf:DIR; must not hold anything yet")
    for name, text in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        p.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{text}-parallel size (default 1); a plain process starts the ranks")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the written weights (default: the source's)")
    p.add_argument("--make-vocab-size-divisible-by", type=int, metavar="N", help="vocabulary padding (x tp) of the Megatron model (default: 128, or the source's)")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--overwrite", action="store_true", help="replace what the destination holds")


def execute(arguments: argparse.Namespace) -> int:
    source, destination = parse_model(arguments.source, None), parse_model(arguments.destination, None)
    model = _model(source)
    parallel = ParallelConfig(tp=arguments.tp, pp=arguments.pp, ep=arguments.ep)
    environment = read_environment()
    ranks = environment.world_size if environment.world_size > 1 else parallel.tp * parallel.pp * parallel.ep
    parallel.validate(ranks, model, "convert")
    check_writable(destination[1], arguments.overwrite)
    if environment.world_size == 1 and ranks > 1:
        return run_local(ranks, sys.argv[1:])
    if arguments.make_vocab_size_divisible_by is not None:
        if arguments.make_vocab_size_divisible_by < 1:
            raise UserError(f"--make-vocab-size-divisible-by is {arguments.make_vocab_size_divisible_by}; it must be at least 1")
        model = model.with_options(make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by)
    with joined(arguments.device) as world:
        _convert(source, destination, model, parallel, arguments.dtype or model.dtype, arguments.overwrite, world)
        if world.rank == 0:
            print(f"{arguments.source} converted to {arguments.destination}", flush=True)
    return 0


def _model(source: tuple[str, Path]) -> ModelConfig:
    kind, directory = source
    return ModelConfig.from_directory(directory) if kind == "hf" else model_config_of(directory)


def _convert(source: tuple[str, Path], destination: tuple[str, Path], model: ModelConfig, parallel: ParallelConfig, dtype: str,
             overwrite: bool, world: World) -> None:
    training = build(model, parallel, dtype, world.device, world.rank, world.size, 0, layer_implementation="torch")
    companions = source[1]
    if source[0] == "hf":
        load_weights(training, source[1], world)
    else:
        load_model(source[1], training)
        companions = source[1] / "hf"
    if destination[0] == "mcore":
        save_model(destination[1], training, companions, overwrite)
        return
    layouts = [mcore_layout(model, parallel, r, world.size, training.dtype, training.names) for r in range(world.size)]
    export_hf(destination[1], layouts, training.tensors, model, training.dtype, companions, world.rank, overwrite=overwrite)
