"""Processes and ranks that the checkpoint tests start (and kill)."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from checkpoint.lease import acquire
from checkpoint.publish import load_rank_file, publishing, save_rank_file
from checkpoint.run_state import find_latest, keep_newest, read_state, resume_point, write_state
from checkpoint.together import rank


def save(run_dir: str, step: int, size: int = 2000, lease: object = None) -> None:
    """A checkpoint whose content says its step: each rank a file, rank 0 a state."""
    with publishing(run_dir, step, lease) as directory:  # type: ignore[arg-type]
        save_rank_file(directory, "weights", {"step": step, "data": torch.full((size,), float(step))})
        if rank() == 0:
            write_state(directory, {"step": step})


def content(directory: Path) -> int:
    """The step that all parts of a checkpoint agree on."""
    loaded = load_rank_file(directory, "weights")
    assert loaded is not None and bool((loaded["data"] == loaded["step"]).all()) and read_state(directory)["step"] == loaded["step"]
    return int(loaded["step"])


def save_steps(run_dir: str, steps: list[int]) -> str | None:
    for step in steps:
        save(run_dir, step)
    latest = find_latest(run_dir)
    return None if latest is None else f"{latest.name} {content(latest)}"


def save_with_failure(run_dir: str, step: int, failing: int, kind: str) -> str:
    """The error that this rank sees when rank `failing` has one while writing."""
    from torch.distributed.checkpoint.api import CheckpointException

    errors = {"value": ValueError("disk is made of cheese"), "dcp": CheckpointException("write", {})}
    try:
        with publishing(run_dir, step) as directory:
            save_rank_file(directory, "weights", {"step": step})
            if rank() == failing:
                raise errors[kind]
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def lease_and_collide(run_dir: str) -> list[str]:
    """A second lease in the owning world is refused on all ranks; after a release it is granted with the next token."""
    from parallel.errors import UserError

    said = []
    with acquire(run_dir, wait_s=0.2) as lease:
        lease.check()
        said.append(str(lease.token))
        try:
            acquire(run_dir, wait_s=0.2)
        except UserError as error:
            said.append(str(error))
    with acquire(run_dir, wait_s=5) as lease:
        said.append(str(lease.token))
    return said


def publish_for_ever(run_dir: str, pipe: int) -> None:
    """For kill -9: publish step after step, starting after the newest; tell each step once it is published."""
    with acquire(run_dir, wait_s=20) as lease:
        latest = resume_point(run_dir)
        step = content(latest) if latest else 0
        os.write(pipe, f"{step}\n".encode())
        while True:
            step += 1
            save(run_dir, step, 20000, lease)
            os.write(pipe, f"{step}\n".encode())
            keep_newest(run_dir, 2)


def kill_rounds(run_dir: str, rounds: str, seed: str) -> None:
    """Fork a publisher and SIGKILL it at a random moment, again and again; after each kill print a line:
    step it resumed from, last step it said was published, step found now, 1 where a kill left a temporary directory."""
    draw = random.Random(int(seed))
    for _ in range(int(rounds)):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            publish_for_ever(run_dir, writer)
        os.close(writer)
        with open(reader) as lines:
            told = [lines.readline() for _ in range(2)]
            began = time.monotonic()
            told.append(lines.readline())
            time.sleep(draw.uniform(0.0, 1.2) * (time.monotonic() - began))  # somewhere within one publish, however slow the disk is
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            told += lines
        left = any(name.startswith(".tmp-") for name in os.listdir(Path(run_dir, "checkpoints")))
        latest = find_latest(run_dir)
        print(int(told[0]), int(told[-1]), content(latest) if latest else 0, int(left), flush=True)


def hold(run_dir: str, how: str) -> None:
    """Own a run directory and sleep. `forked` also leaves a forked child that sleeps on."""
    with acquire(run_dir, wait_s=20) as lease:
        if how == "forked" and (child := os.fork()) == 0:
            time.sleep(30)
            os._exit(0)
        print(f"owner {lease.token} {child if how == 'forked' else 0}", flush=True)
        time.sleep(60)


def hold_as_rank(run_dir: str) -> None:
    """Hold only the shared lock, as a rank of an owner that has died would."""
    import fcntl

    handle = os.open(Path(run_dir, "lease", "ranks.lock"), os.O_RDWR)
    fcntl.lockf(handle, fcntl.LOCK_SH)
    print("holding", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
