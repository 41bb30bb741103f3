"""TensorRT-LLM for real: everything that the driver assumes of it, checked on a machine with the wheel and a GPU.

    python -m benchmarks.trtllm_smoke --model models/SmolLM2-135M-Instruct
    torchrun --nproc-per-node 2 -m benchmarks.trtllm_smoke --model DIR            # one engine over 2 GPUs
    mpirun -n 2 python -m benchmarks.trtllm_smoke --model DIR --owner inprocess
    python -m benchmarks.trtllm_smoke --write-snapshot FILE                        # the interface as installed; needs no GPU
    python -m benchmarks.trtllm_smoke --compare FILE                               # the same, against an earlier one

Prints one line for each check. Exit code 0: all passed, 1: some failed, 2: it cannot run here (tensorrt_llm or a GPU is missing).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mcore_rl.run import joined
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.layout import canonical_blocks
from resharding.layouts import hf_layout
from resharding.sync import WeightSync
from trtllm_rollout.driver.engine import TensorRTEngine
from trtllm_rollout.driver.options import DriverOptions
from trtllm_rollout.driver.sampling import CPP, TORCH
from trtllm_rollout.driver.seam import build, surface
from trtllm_rollout.driver.start import make_engine
from trtllm_rollout.protocol import Completion, EngineRefuses, Request, SamplingParams

PROMPT = tuple(range(11, 43))
GAP = {torch.bfloat16: 0.15, torch.float32: 1e-3}  # largest |engine - transformers| log-prob of a token that counts as the same


@dataclass
class Report:
    """The outcome of each check, printed as it is known."""

    failed: list[str] = field(default_factory=list)
    speaks: bool = True

    def check(self, name: str, good: bool, said: str = "") -> None:
        if self.speaks:
            print(f"{'pass' if good else 'FAIL'}  {name}{': ' + said if said else ''}", flush=True)
        if not good:
            self.failed.append(name)

    def run(self, name: str, function: Callable[[], tuple[bool, str]]) -> None:
        """An exception fails the check and does not end the session."""
        try:
            self.check(name, *function())
        except Exception as error:
            self.check(name, False, f"{type(error).__name__}: {error}")


@dataclass
class Session:
    """One engine under test. `reference(ids)` gives transformers' logits [tokens, vocab] of the same files."""

    directory: Path
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    rank: int
    size: int
    reference: Callable[[Sequence[int]], torch.Tensor]

    @contextmanager
    def engine(self, options: DriverOptions, temperature: float = 1.0) -> Iterator[TensorRTEngine]:
        group = dist.new_group(backend="gloo") if self.size > 1 else None
        engine = make_engine(self.model, self.dtype, tuple(range(self.size)), self.rank, 0, group, self.device, options, 16, temperature)
        try:
            yield engine
        finally:
            engine.close()

    def sync(self, engine: TensorRTEngine, version: int, scale: float = 1.0) -> float:
        """Seconds. Rank 0 reads the files; `scale` multiplies the final norm."""
        tensors: dict[str, torch.Tensor] = {}
        if self.rank == 0:
            for file in sorted(self.directory.glob("*.safetensors")):
                tensors |= {n: t.to(self.device, self.dtype) for n, t in load_file(file).items()}
            tensors["model.norm.weight"] = tensors["model.norm.weight"] * scale
        layout = hf_layout(self.model, self.dtype)
        sync = WeightSync([layout], engine.layouts, canonical_blocks(self.model), self.rank)
        started = time.perf_counter()
        sync.run({t.name: tensors[t.name] for t in layout.tensors} if tensors else {}, engine, version)
        return time.perf_counter() - started

    def gap(self, done: Completion, temperature: float) -> float:
        logits = self.reference([*PROMPT, *done.token_ids])[len(PROMPT) - 1:-1].double() / (temperature or 1.0)
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(done.token_ids, device=logits.device)[:, None])[:, 0]
        return float((torch.tensor(done.log_probs, device=logits.device).double() - expected).abs().max())


def ask(engine: TensorRTEngine, samples: int = 1, **sampling: Any) -> list[Completion]:
    return engine.generate([Request(0, PROMPT, SamplingParams(**sampling), samples, (7, 1))])


def check_weights(s: Session, options: DriverOptions, report: Report) -> None:
    """A sync, a second one with other weights, the memory behind handles used again, sleep and wake, abort, the end."""
    with s.engine(options) as engine:
        report.run(f"sync ({engine._owner.route})", lambda: (s.sync(engine, 1) > 0 and engine._owner.checked, "parameters were read back"))
        first = ask(engine, temperature=0.0, max_tokens=16)[0]
        report.run("greedy log-probs are transformers'", lambda: ((g := s.gap(first, 1.0)) < GAP[s.dtype], f"largest gap {g:.4f}"))
        report.run("weights outlive the memory they came through", lambda: written_over(s, engine, first))
        s.sync(engine, 2, scale=0.25)
        second = ask(engine, temperature=0.0, max_tokens=16)[0]
        report.check("another version gives other log-probs (no cached prefix is left)",
                     second.log_probs != first.log_probs and set(second.versions) == {2})
        stop = first.token_ids[3]
        s.sync(engine, 3)
        ended = ask(engine, temperature=0.0, max_tokens=16, stop_token_ids=(stop,))[0]
        report.check("the stop token stays in the sample", ended.token_ids[-1] == stop and ended.finish_reason == "stop", str(ended.token_ids))
        if options.sleep:
            report.run("sleep gives memory back", lambda: slept(s, engine))
        engine.submit([Request(5, PROMPT, SamplingParams(max_tokens=64)), Request(6, PROMPT, SamplingParams(max_tokens=8))])
        engine.abort([5])
        done = {c.request_id: c.finish_reason for c in engine.stream()}
        report.check("abort ends one request alone", done == {5: "abort", 6: "length"}, str(done))


def written_over(s: Session, engine: TensorRTEngine, first: Completion) -> tuple[bool, str]:
    """Takes the memory that was behind the handles, writes over it, and asks again."""
    noise = [torch.full((1 << 20,), float("nan"), device=s.device) for _ in range(256 if s.device.type == "cuda" else 1)]
    engine._verify()
    again = ask(engine, temperature=0.0, max_tokens=16)[0]
    return again.token_ids == first.token_ids, f"{4 * len(noise)} MB were written"


def slept(s: Session, engine: TensorRTEngine) -> tuple[bool, str]:
    """At least 95 % of weights and cache; then the time from waking to a token."""
    before = free_bytes(s.device)
    engine.sleep(["kv_cache", "weights"])
    given = free_bytes(s.device) - before
    try:
        ask(engine)
        refused = False
    except EngineRefuses:
        refused = True
    started = time.perf_counter()
    engine.wake(["weights"])
    s.sync(engine, 4)
    engine.wake(["kv_cache"])
    ask(engine, max_tokens=1)
    held = engine.layouts[s.rank].nbytes
    good = refused and (s.device.type != "cuda" or given >= 0.95 * held)
    return good, f"{given / 1e9:.2f} GB, of which weights {held / 1e9:.2f}; wake, sync and first token {time.perf_counter() - started:.2f} s"


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def check_sampling(s: Session, options: DriverOptions, report: Report) -> None:
    """What each sampler reports, against transformers, at temperatures and with cuts; seeds."""
    for sampler, temperature, log_probs in ((TORCH, 1.0, "reported"), (TORCH, 0.7, "logits"), (CPP, 1.0, "reported"), (CPP, 0.7, "reported")):
        with s.engine(replace(options, sampler=sampler, log_probs=log_probs), temperature) as engine:
            s.sync(engine, 1)
            for cut in ({}, {"top_k": 20}, {"top_p": 0.8}):
                name = f"log-probs of {sampler} ({log_probs}) at temperature {temperature} {cut or ''}".rstrip()
                report.run(name, lambda: ((g := max(s.gap(c, temperature) for c in ask(
                    engine, 2, temperature=temperature, max_tokens=16, **cut))) < GAP[s.dtype], f"largest gap {g:.4f}"))
            two = [[c.token_ids for c in ask(engine, 2, temperature=temperature, max_tokens=16)] for _ in range(2)]
            same = two[0] == two[1] and two[0][0] != two[0][1]
            if s.rank == 0:
                print(f"note  {sampler}: the same seed {'gives' if same else 'does NOT give'} the same sample", flush=True)


def all_checks(s: Session, options: DriverOptions, report: Report) -> None:
    ways = ("rank_local", "public") if options.owner == "ray" else ("auto",)
    for way in ways:
        check_weights(s, replace(options, weights=way), report)
    check_sampling(s, options, report)


def interface(arguments: argparse.Namespace) -> int:
    found = surface.surface()
    if arguments.write_snapshot:
        Path(arguments.write_snapshot).write_text(json.dumps(found, indent=1) + "\n")
        print(f"the interface of tensorrt_llm {found['version']} is in {arguments.write_snapshot}")
    if arguments.compare:
        lines = surface.difference(found, json.loads(Path(arguments.compare).read_text()))
        print("\n".join(lines) or f"tensorrt_llm {found['version']} is as recorded in {arguments.compare}")
        return int(any("without" in line or "not installed" in line for line in lines))
    return 0


def main(options: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", metavar="DIR", help="Hugging Face directory")
    p.add_argument("--owner", choices=("ray", "inprocess"), default="ray")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--write-snapshot", metavar="FILE")
    p.add_argument("--compare", metavar="FILE")
    arguments = p.parse_args(options)
    try:
        features = build.load("any")
        if arguments.write_snapshot or arguments.compare:
            return interface(arguments)
        if not torch.cuda.is_available():
            raise UserError("torch sees no CUDA device; this script checks TensorRT-LLM on one")
        if arguments.model is None:
            raise UserError("--model DIR is missing")
        with joined("cuda") as world:
            report = Report(speaks=world.rank == 0)
            report.check("version", features.version == build.TARGET, f"{features.version} (the driver is written for {build.TARGET}); {features}")
            session = open_session(Path(arguments.model), getattr(torch, arguments.dtype), world.device.torch, world.rank, world.size)
            all_checks(session, DriverOptions(owner=arguments.owner, allow_version="any"), report)
    except UserError as error:
        print(f"trtllm_smoke: {error}", file=sys.stderr)
        return 2
    return 1 if report.failed else 0


def open_session(directory: Path, dtype: torch.dtype, device: torch.device, rank: int, size: int) -> Session:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()

    def logits(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return reference(torch.tensor([list(ids)], device=device)).logits[0]

    return Session(directory, ModelConfig.from_directory(directory), dtype, device, rank, size, logits)


if __name__ == "__main__":
    sys.exit(main())
