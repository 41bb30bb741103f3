"""The command line: `mcore-rl COMMAND ...` or `python -m mcore_rl COMMAND ...`. The composition root: it may import every room.

Exit codes: 0 done; 2 bad input (one message that says what to do); 3 an on-policy gate stopped the run; 1 anything else.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = ("train", "sft", "evaluate", "convert", "generate", "serve", "plan", "bench", "fetch")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="mcore-rl", description="Post-train large language models on Megatron-Core.", formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  torchrun --nproc-per-node 2 -m mcore_rl train configs/demo_cpu.yaml")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"mcore_rl.commands.{name}").add(commands)
    return top


def command(commands: argparse._SubParsersAction, name: str, summary: str, example: str, extra: str = "") -> argparse.ArgumentParser:
    """A command's parser, with an example at the end of its help."""
    return commands.add_parser(name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter,
                               epilog=(extra + "\n\n" if extra else "") + f"example:\n  {example}")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = parser().parse_args(argv)
    set_up_logging("info")
    sys.exit(_execute(arguments))


def _execute(arguments: argparse.Namespace) -> int:
    from mcore_rl.gates import OffPolicy
    from parallel.errors import UserError
    from trtllm_rollout.protocol import EngineRefuses

    try:
        return int(importlib.import_module(f"mcore_rl.commands.{arguments.command}").execute(arguments))
    except UserError as error:
        return _say(f"mcore-rl: error: {error}", 2)
    except OffPolicy as error:
        return _say(f"mcore-rl: stopped: {error}", 3)
    except EngineRefuses as error:
        return _say(f"mcore-rl: stopped: {error}", 1)
    except KeyboardInterrupt:
        return _say("mcore-rl: interrupted", 130)


def _say(text: str, code: int) -> int:
    """Print once: rank 0 at once; another rank only where rank 0 does not end the run with the same message first."""
    rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("SLURM_PROCID") or 0)
    if rank:
        time.sleep(15)
        text = f"rank {rank}: {text}"
    print(text, file=sys.stderr, flush=True)
    return code


def set_up_logging(level: str) -> None:
    """Messages of our rooms at `level`, those of libraries only where they warn of something that matters."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for room in ("launch", "mcore_rl", "trtllm_rollout", "checkpoint", "resharding", "parallel"):
        logging.getLogger(room).setLevel(level.upper())
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    # what torch and Megatron-Core deprecate or miss on a CPU is not the user's business
    warnings.filterwarnings("ignore", module=r"(torch|megatron)\b")
    warnings.filterwarnings("ignore", category=FutureWarning)
