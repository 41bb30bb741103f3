"""Ranks on this machine from a plain process: torchrun as a child that dies with its parent.

    from launch.local import run_local
    code = run_local(2, ["train", "configs/demo_cpu.yaml"])      # like: torchrun --nproc-per-node 2 -m mcore_rl train ...

`python -m launch.local ARGUMENTS` is torchrun with the same arguments, except that it exits with the exit code of the rank
that failed first (torchrun: always 1) and prints no traceback of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType

from parallel.environment import die_with_parent
from parallel.errors import UserError

# What a rank finds of an outer launcher must not reach the inner one, which sets these itself.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
                   "MASTER_ADDR", "MASTER_PORT")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local(nproc: int, argv: Sequence[str], env: Mapping[str, str] | None = None, module: str = "mcore_rl") -> int:
    """Run `python -m module *argv` on `nproc` ranks of this machine and return the exit code (128 + n for signal n).

    `env` is added to this process's environment. SIGINT, SIGTERM and SIGHUP are passed on; the ranks die with this process,
    also when it is killed with SIGKILL. Raises UserError for `nproc` below 1.
    """
    if nproc < 1:
        raise UserError(f"{nproc} processes asked for; it must be at least 1")
    command = [sys.executable, "-m", "launch.local", "--standalone", "--nproc-per-node", str(nproc), "-m", module, *argv]
    parent = os.getpid()

    def in_child() -> None:
        die_with_parent()
        if os.getppid() != parent:  # the parent died before the signal was set
            os._exit(1)

    child = subprocess.Popen(command, env=_environment(env), preexec_fn=in_child, start_new_session=True)
    code = _wait(child)
    return code if code >= 0 else 128 - code


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC")}
    kept.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, without its warning
    return {**kept, **(extra or {})}


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child, passing signals on (only the main thread may install handlers)."""
    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        return child.wait()
    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str]) -> int:
    """torchrun with `arguments`; returns the exit code of the first rank that failed, 0 where all ended well."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:
            print(f"rank {rank} was ended by signal {signal.Signals(-code).name}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
