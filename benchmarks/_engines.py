"""Several engines at once, a process each with its share of the threads: what the data-parallel ranks of a run on this machine do."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks._rollout_work import Ran, Transformers, Work, engine_for, from_files, run_engine
from parallel.device import prepare_dtype, prepare_megatron, select_device
from parallel.model_config import ModelConfig

PATIENCE_S = 3600.0


@dataclass(frozen=True)
class Setting:
    """What every process makes: an engine for `samples` at once of at most `tokens` tokens each."""

    directory: str
    dtype: torch.dtype
    samples: int
    tokens: int
    threads: int


class Engines:
    """`count` processes; prompt p belongs to process p % count. A context: the processes end with it."""

    def __init__(self, count: int, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._together = context.Barrier(count)
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(theirs, setting, self._together), daemon=True))
            self._processes[-1].start()
            self._pipes.append(ours)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(10)
            process.kill()

    def run(self, work: Work) -> Ran:
        """All engines, each its share; they begin together, and the seconds are those of the last one to end."""
        return self._all("engine", work)

    def transformers(self, work: Work) -> Ran:
        """transformers in as many processes, likewise."""
        return self._all("transformers", work)

    def _all(self, who: str, work: Work) -> Ran:
        count = len(self._pipes)
        for i, pipe in enumerate(self._pipes):
            pipe.send((who, _share(work, i, count)))
        parts = []
        for pipe in self._pipes:
            if not pipe.poll(PATIENCE_S):
                raise TimeoutError(f"bench rollout: a process gave no answer in {PATIENCE_S:.0f} s")
            part = pipe.recv()
            if isinstance(part, str):
                raise RuntimeError(f"bench rollout: a process failed:\n{part}")
            parts.append(part)
        answers = [parts[p % count].answers[p // count * work.samples:][:work.samples] for p in range(len(work.prompts))] if parts[0].answers else []
        return Ran(max(part.seconds for part in parts), _sums([part.stats for part in parts]), tuple(a for group in answers for a in group))


def _share(work: Work, index: int, count: int) -> Work:
    groups = [work.lengths[p * work.samples:][:work.samples] for p in range(index, len(work.prompts), count)]
    return replace(work, prompts=work.prompts[index::count], lengths=tuple(n for group in groups for n in group))


def _sums(stats: list[Mapping[str, float]]) -> dict[str, float]:
    """What the engines counted together. Seconds are those of one engine: their mean."""
    return {name: sum(s[name] for s in stats) / (len(stats) if name.startswith("seconds_") else 1) for name in stats[0]}


def _serve(pipe: Connection, setting: Setting, together: Any) -> None:
    torch.set_num_threads(setting.threads)
    device = select_device("cpu")
    prepare_megatron(device)
    prepare_dtype(setting.dtype, device)
    model = ModelConfig.from_directory(setting.directory)
    engine = rival = None
    while True:
        try:
            who, work = pipe.recv()
        except EOFError:
            return
        try:
            if who == "engine":
                engine = engine or engine_for(model, setting.dtype, device.torch, setting.samples, setting.tokens, from_files(setting.directory, model))
            else:
                engine, rival = None, rival or Transformers(setting.directory, setting.dtype, device.torch)
            together.wait()
            pipe.send(run_engine(engine, work) if engine else rival.run(work))
        except BaseException:
            together.abort()
            pipe.send(traceback.format_exc())
