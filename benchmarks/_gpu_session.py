"""The rows of `benchmarks/gpu_session.sh`: each a question, measured in a process of its own, with a limit of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

COPIED = 1 << 30  # bytes
RESHARD = ("seconds_without_checksums", "gb_per_s_without_checksums", "gb_per_s", "transport", "transport_gb_per_s", "of_transport_without_checksums",
           "copy_gb_per_s", "of_copy_without_checksums", "peak_extra_bytes", "times_faster_than_gather_without_checksums")
ROLLOUT = ("decode_tokens_per_s", "decode_step_seconds", "bandwidth_gb_per_s", "decode_of_bandwidth", "prefill_tokens_per_s", "prefill_of_gemm")
TRAIN = ("mfu", "packed_seconds", "useful_tokens_per_s", "packed_speedup", "gemm_gflops")
STEP = ("step_s", "rollout_s", "log_probs_s", "update_s", "sync_s", "other_s", "update_of_ideal", "response_tokens")
LARGE = 40e9  # bytes of GPU memory from which on the larger made-up model is generated with


@dataclass(frozen=True)
class Question:
    """`options` of `bench` (None: device copies, in this process) and the `figures` to show. It needs `gpus`, and is given up after
    `limit` seconds."""

    text: str
    gpus: int
    limit: float
    options: str | None = None
    figures: tuple[str, ...] = RESHARD


QUESTIONS = (
    Question("device copy of 1 GiB", 1, 30),
    Question("CUDA IPC, two processes on one GPU, TP2 to TP1", 1, 90, "reshard --train tp2 --rollout tp1 --procs 2 --transport cuda_ipc"),
    Question("sync in place on one GPU, TP2 to TP2", 1, 90, "reshard --train tp2 --rollout tp2 --procs 2"),
    Question("decoding of 32 samples beside the memory's bandwidth (goal: 0.6), prefill of 32 x 512 tokens beside the products", 1, 120,
             "rollout --limits --model MODEL --batch 32 --prompt-tokens 512 --max-tokens 128 --repeat 2", ROLLOUT),
    Question("decoding of 256 samples, the same", 1, 80, "rollout --limits --model MODEL --batch 256 --prompt-tokens 128 --max-tokens 64", ROLLOUT),
    Question("training: packed update of a 1B llama in bfloat16, operations beside the products (goal of mfu: 0.45)", 1, 110,
             "train --model made-up-1b --dtype bfloat16 --only packed --repeat 3", TRAIN),
    Question("a whole small GRPO step on one GPU, warm-up of its model included in the time it may take", 1, 100,
             "step configs/demo_cpu.yaml --ranks 1 --steps 3", STEP),
    Question("CUDA IPC and casts, float32 trainer, bfloat16 engine", 1, 80, "reshard --train tp2 --rollout tp1 --procs 2 --train-dtype float32 --no-gather"),
    Question("NCCL point to point between two GPUs, TP2 to TP1", 2, 80, "reshard --train tp2 --rollout tp1 --procs 2 --transport point_to_point --no-gather"),
    Question("CUDA IPC between two GPUs, TP2 to TP1", 2, 60, "reshard --train tp2 --rollout tp1 --procs 2 --transport cuda_ipc --no-gather"),
)


def main() -> None:
    end = time.monotonic() + 465
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    title = f"{torch.cuda.get_device_name(0)} x {gpus}, torch {torch.__version__}" if gpus else f"no GPU, torch {torch.__version__}"
    table = Table("question", "figure", "value", title=title, title_justify="left")
    for question in QUESTIONS:
        rows = list(_answer(question, gpus, end - time.monotonic()))
        for i, (figure, value) in enumerate(rows):
            table.add_row(question.text if i == 0 else "", figure, value, end_section=i == len(rows) - 1)
    Console(width=max(120, Console().width)).print(table)


def _answer(question: Question, gpus: int, left: float) -> Iterator[tuple[str, str]]:
    if gpus < question.gpus:
        yield "", f"not run: needs {question.gpus} GPU{'s' * (question.gpus > 1)}, torch sees {gpus}"
    elif left < question.limit:
        yield "", f"not run: {left:.0f} s of the session are left, it may take {question.limit:.0f} s"
    elif question.options is None:
        yield "gb_per_s (written)", f"{_device_copy():,.4g}"
    else:
        yield from _bench(question)


def _device_copy() -> float:
    source, target = (torch.ones(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return COPIED / best / 1e9


def _bench(question: Question) -> Iterator[tuple[str, str]]:
    model = "made-up-8b" if torch.cuda.get_device_properties(0).total_memory >= LARGE else "made-up-05b"
    name, *options = (question.options or "").replace("MODEL", model).split()
    options += ["--repeat", "5"] if name == "reshard" else []
    device = ["run.device=cuda"] if name == "step" else ["--device", "cuda"]
    command = [sys.executable, "-m", "mcore_rl", "bench", name, "--json", *options, *device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=question.limit, env={**os.environ, "OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        yield "", f"failed: no answer within {question.limit:.0f} s"
        return
    if done.returncode:
        yield "", "failed: " + (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        return
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    for name in question.figures:
        if name in figures:
            value = figures[name]
            yield name, f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
