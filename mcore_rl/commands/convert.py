"""`mcore-rl convert SRC DST`: between Hugging Face directories, Megatron checkpoints and TensorRT-LLM's engine checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from checkpoint.convert import FORMS, Report, Source, check_destination, open_model, verify, write_hf, write_mcore
from checkpoint.files import MANIFEST
from checkpoint.hf_writer import check_writable
from checkpoint.run_state import verify as verify_files
from checkpoint.together import on_rank_zero, rank, world_size
from checkpoint.trtllm_engine import check_writable as check_engine_writable
from checkpoint.trtllm_engine import verify_engine, write_engine
from mcore_rl.cli import command
from mcore_rl.models import parse_model
from mcore_rl.run import joined
from parallel.config import ParallelConfig
from parallel.environment import read_environment
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.errors import WeightsError
from resharding.layouts.trtllm_engine import EngineMapping

ENGINE = "trtllm-engine"
# options that say something of some kinds of destination only
_FOR = {"tp": ("mcore", ENGINE), "pp": ("mcore", ENGINE), "ep": ("mcore",), "etp": ("mcore",), "moe_tp": (ENGINE,), "moe_ep": (ENGINE,),
        "make_vocab_size_divisible_by": ("mcore",), "format": ("mcore",), "max_shard_gb": ("hf", "mcore")}


def add(commands: Any) -> None:
    p = command(commands, "convert",
                "Convert a model between a Hugging Face directory (hf:DIR), a Megatron checkpoint (mcore:DIR) and TensorRT-LLM's (trtllm-engine:DIR).",
                "mcore-rl convert hf:models/demo-warm mcore:models/demo-warm-mcore --tp 2",
                "One process is enough for any sizes and any model: tensors stream from files to files. Under torchrun the ranks share the work.\n"
                "A Megatron checkpoint can be read under any layout: the sizes set how tensors are cut into chunks and the padding of the vocabulary.\n"
                "mcore:DIR as a source may also be a directory of Megatron-LM or Megatron-Bridge, or one iteration in it.")
    p.add_argument("source", metavar="SRC", help="hf:DIR or mcore:DIR")
    p.add_argument("destination", metavar="DST", help="mcore:DIR, hf:DIR or trtllm-engine:DIR; must not hold anything yet")
    for name, text in (("tp", "tensor-parallel size"), ("pp", "pipeline-parallel size"), ("ep", "expert-parallel size"),
                       ("etp", "tensor-parallel size of experts (default: tp)"), ("moe-tp", "engine: ranks that one expert is cut over"),
                       ("moe-ep", "engine: ranks that experts are spread over")):
        p.add_argument(f"--{name}", type=int, metavar="N", help=text)
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the written weights (default: the source's)")
    p.add_argument("--make-vocab-size-divisible-by", type=int, metavar="N", help="vocabulary padding (x tp) of the Megatron model (default: 128, or the source's)")
    p.add_argument("--format", choices=FORMS, help="whose directory mcore:DIR becomes (default mcore-rl)")
    p.add_argument("--hf-config", metavar="DIR", help="where config.json is, for a Megatron checkpoint that does not say enough of its model")
    p.add_argument("--without-mtp", action="store_true", help="leave out layers for multi-token prediction")
    p.add_argument("--max-shard-gb", type=float, metavar="GB", help="largest file (default 5)")
    p.add_argument("--verify", action="store_true", help="read what was written back and compare it bit for bit")
    p.add_argument("--overwrite", action="store_true", help="replace the model that the destination holds")


def execute(arguments: argparse.Namespace) -> int:
    source, destination = parse_model(arguments.source, None), _target(arguments.destination)
    _check_options(arguments, source[0], destination[0])
    destination = (destination[0], _place(source[1], destination[1]))
    with contextlib.ExitStack() as stack:
        if read_environment().world_size > 1:
            stack.enter_context(joined("cpu"))
        stack.enter_context(_interrupted_by_sigterm())
        if arguments.verify and (source[1] / MANIFEST).is_file():
            verify_files(source[1])  # what is read must be what was once written
        opened = stack.enter_context(open_model(*source, arguments.hf_config, arguments.without_mtp))
        started = time.perf_counter()
        write = _writer(arguments, opened, destination)
        try:
            with _progress("writing") as report:
                write(report)
        except OSError as error:
            raise UserError(f"{arguments.destination} cannot be written: {error}; nothing was published") from None
        if arguments.verify:
            try:
                with _progress("verifying") as report:
                    _verify(arguments, opened, destination, report)
            except WeightsError as error:
                if rank() == 0:
                    print(f"mcore-rl: error: {error}", file=sys.stderr, flush=True)
                return 1
        if rank() == 0:
            seconds = time.perf_counter() - started
            print(f"{arguments.source} converted to {arguments.destination}" + (" and verified" if arguments.verify else "")
                  + f" ({opened.layout.nbytes / 1e9:.2f} GB in {seconds:.1f} s)", flush=True)
            if destination[0] == ENGINE:
                print("build the engine with: " + build_command(destination[1], opened.model, _mapping(arguments)), flush=True)
    return 0


def build_command(directory: Path, model: ModelConfig, mapping: EngineMapping) -> str:
    """What makes a classic engine of the checkpoint (TensorRT-LLM up to about July 2026 has trtllm-build: docs/tensorrt-llm.md)."""
    return shlex.join(["trtllm-build", "--checkpoint_dir", str(directory), "--output_dir", f"{directory}-engine", "--gemm_plugin", "auto",
                       "--max_seq_len", str(model.max_position_embeddings), "--workers", str(mapping.world_size)])


def _place(source: Path, destination: Path) -> Path:
    """Where the destination really is: a link's target. Raises UserError where it cannot be written, or touches the source."""
    try:
        real, read = Path(os.path.realpath(destination)), Path(os.path.realpath(source))
        if real == read or real.is_relative_to(read) or read.is_relative_to(real):
            raise UserError(f"source {str(source)!r} and destination {str(destination)!r} are the same directory or one lies in the other; "
                            "give a destination apart from the source")
        with contextlib.suppress(FileNotFoundError):
            os.lstat(real)  # a name that is too long
        above = next(p for p in real.parents if p.exists())
        if above.is_dir() and rank() == 0:
            os.rmdir(tempfile.mkdtemp(prefix=".mcore-rl-", dir=above))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"destination {str(destination)!r} cannot be written: {error}; give another directory") from None
    return real if destination.is_symlink() else destination


def _target(name: str) -> tuple[str, Path]:
    if name.startswith(ENGINE + ":"):
        return ENGINE, Path(name.removeprefix(ENGINE + ":"))
    return parse_model(name, None)


def _check_options(arguments: argparse.Namespace, source: str, destination: str) -> None:
    """Refuse options that would do nothing, and sizes that are none."""
    for name, kinds in _FOR.items():
        value = getattr(arguments, name)
        flag = "--" + name.replace("_", "-")
        if value is not None and destination not in kinds:
            raise UserError(f"{flag} says nothing of a destination {destination}:DIR; it is for {' and '.join(k + ':DIR' for k in kinds)}: leave it out")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{flag} is {value}; it must be a number more than 0")
        if isinstance(value, (int, float)) and value <= 0 or isinstance(value, int) and value < 1:
            raise UserError(f"{flag} is {value}; it must be at least 1" if isinstance(value, int) else f"{flag} is {value}; it must be more than 0")
    if arguments.hf_config is not None and source != "mcore":
        raise UserError("--hf-config is for a source mcore:DIR; a Hugging Face directory has its own config.json")


def _writer(arguments: argparse.Namespace, source: Source, destination: tuple[str, Path]) -> Callable[[Report], None]:
    """What writes the destination; everything that can be refused is refused here."""
    kind, directory = destination
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    size = int(arguments.max_shard_gb * 1e9) if arguments.max_shard_gb else 5 << 30
    if kind == "hf":
        on_rank_zero(lambda: check_writable(directory, arguments.overwrite), f"writing {directory}")
        return lambda report: write_hf(source, directory, dtype, arguments.overwrite, size, report)
    if kind == "mcore":
        on_rank_zero(lambda: check_destination(directory, arguments.overwrite), f"writing {directory}")
        parallel = _parallel(arguments, source.model)
        return lambda report: write_mcore(source, directory, parallel, dtype, arguments.format or "mcore-rl", arguments.overwrite,
                                          arguments.make_vocab_size_divisible_by, size, report)
    mapping = _mapping(arguments)
    mapping.check(source.model)
    on_rank_zero(lambda: check_engine_writable(directory, arguments.overwrite), f"writing {directory}")
    return lambda report: on_rank_zero(lambda: write_engine(directory, source.files, source.layout, source.model, mapping, dtype or source.dtype,
                                                            arguments.overwrite, report), f"writing {directory}")


def _mapping(arguments: argparse.Namespace) -> EngineMapping:
    return EngineMapping(arguments.tp or 1, arguments.pp or 1, arguments.moe_tp, arguments.moe_ep)


def _parallel(arguments: argparse.Namespace, model: ModelConfig) -> ParallelConfig:
    """The sizes, checked against the model. Stages need not be even: every layer is a chunk of its own."""
    tp, ep, pp = arguments.tp or 1, arguments.ep or 1, arguments.pp or 1
    etp = arguments.etp or (1 if model.moe is not None and model.moe.expert_bias else None)
    if pp > model.num_layers:
        raise UserError(f"--pp is {pp}; the model has {model.num_layers} layers, so it may be at most that")
    ParallelConfig(tp=tp, ep=ep, etp=etp, sequence_parallel=tp > 1).validate(math.lcm(tp, (etp or tp) * ep), model, "convert")
    return ParallelConfig(tp=tp, pp=pp, ep=ep, etp=etp, sequence_parallel=tp > 1)


def _verify(arguments: argparse.Namespace, source: Source, destination: tuple[str, Path], report: Report) -> None:
    kind, directory = destination
    if kind == ENGINE:
        dtype = getattr(torch, arguments.dtype) if arguments.dtype else source.dtype
        on_rank_zero(lambda: verify_engine(directory, source.files, source.layout, source.model, _mapping(arguments), dtype), f"verifying {directory}")
        return
    with open_model(kind, directory) as written:
        verify(source, written, report)


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends as Ctrl-C does: what is half written is removed."""
    if threading.current_thread() is not threading.main_thread() or world_size() > 1:
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(doing: str) -> Iterator[Report]:
    """A bar on a terminal; elsewhere a line now and then. Only rank 0 shows its share."""
    console = Console(stderr=True, highlight=False)
    if rank() != 0 or not console.is_terminal:
        yield _lines(doing, console) if rank() == 0 else lambda done, total: None
        return
    with Progress(TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(doing: str, console: Console, seconds: float = 10.0) -> Report:
    last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            console.print(f"{doing}: {done / 1e9:.1f} of {total / 1e9:.1f} GB ({100 * done // max(total, 1)} %)", markup=False)

    return line
