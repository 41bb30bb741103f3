"""What the ranks of the launch tests run: `python -m tests.launch.rank_scripts NAME [ARGUMENTS]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def sum_ranks(directory: str) -> None:
    """Start a world from the environment, add the ranks up, write what this rank saw."""
    import torch
    import torch.distributed as dist

    from parallel.environment import exit_with_launcher, read_environment, start

    environment = read_environment()
    armed = exit_with_launcher(environment)
    start(environment, "gloo")
    total = torch.tensor([float(environment.rank)])
    dist.all_reduce(total)
    Path(directory, f"rank{environment.rank}").write_text(f"{environment.launcher} {armed} {environment.world_size} {total.item():g}")
    dist.destroy_process_group()


def sleep(directory: str) -> None:
    """Write the pid and sleep, as a rank that waits in a collective would."""
    from parallel.environment import exit_with_launcher, read_environment

    environment = read_environment()
    exit_with_launcher(environment)
    path = Path(directory, f"pid{environment.rank}")
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    time.sleep(120)


def fail(code: str) -> None:
    """Rank 1 exits with `code`; the others wait for it."""
    if os.environ["RANK"] == "1":
        sys.exit(int(code))
    time.sleep(120)


def launch_sleepers(directory: str) -> None:
    from launch.local import run_local

    sys.exit(run_local(2, ["sleep", directory], module="tests.launch.rank_scripts"))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
