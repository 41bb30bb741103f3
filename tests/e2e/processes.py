"""Real runs under torchrun, found again by a mark in their environment (so that orphans are seen too)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Launched:
    """`torchrun --nproc-per-node ranks -m mcore_rl *arguments` in the background."""

    def __init__(self, log: Path, *arguments: str, ranks: int = 2) -> None:
        self.mark = f"MCORE_RL_TEST={uuid.uuid4().hex}"
        env = {k: v for k, v in os.environ.items() if k not in _OUTER}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), self.mark.split("=")[0]: self.mark.split("=")[1]}
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "mcore_rl", *arguments],
                cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)

    def pids(self) -> list[int]:
        """Every live process of this launch, the launcher first."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    alive = " Z " not in (entry / "stat").read_text().rsplit(")", 1)[1][:3]
                    if alive and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:  # it ended meanwhile
                    continue
        return sorted(found, key=lambda pid: (pid != self.process.pid, pid))

    def ranks(self) -> list[int]:
        """The rank processes."""
        return [pid for pid in self.pids() if pid != self.process.pid and b"mcore_rl" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def finish(self, timeout: float = 240) -> int:
        return self.process.wait(timeout)

    def end(self) -> None:
        """Clean up after a test that failed."""
        for pid in self.pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout:.0f} s")
        time.sleep(0.02)
