"""The same program starts under every launcher, and no rank outlives its launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.local import run_local
from parallel.errors import UserError
from tests.parallel.test_environment import gone

SCRIPT = "tests.launch.rank_scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", SCRIPT]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def clean_environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in names} | dict(
        OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def launchers() -> dict[str, list[str]]:
    found = {"torchrun": TORCHRUN, "plain": [sys.executable, "-m", SCRIPT]}
    if MPIRUN:
        found["mpirun"] = [MPIRUN, "--oversubscribe", "-n", "2", sys.executable, "-m", SCRIPT]
    return found


@pytest.mark.parametrize("launcher", launchers())
def test_ranks_find_each_other(launcher: str, tmp_path: Path) -> None:
    done = subprocess.run([*launchers()[launcher], "sum_ranks", str(tmp_path)], env=clean_environment(), capture_output=True,
                          text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    size = 1 if launcher == "plain" else 2
    for rank in range(size):
        assert (tmp_path / f"rank{rank}").read_text() == f"{launcher} {launcher != 'plain'} {size} {size - 1}"


def pids(directory: Path, count: int = 2) -> list[int]:
    deadline = time.monotonic() + 60
    while len(files := sorted(directory.glob("pid[0-9]"))) < count:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int(path.read_text()) for path in files]


@pytest.mark.parametrize("launcher", [name for name in launchers() if name != "plain"])
def test_ranks_die_when_the_launcher_alone_is_killed(launcher: str, tmp_path: Path) -> None:
    process = subprocess.Popen([*launchers()[launcher], "sleep", str(tmp_path)], env=clean_environment(), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks = pids(tmp_path)
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in ranks)


def test_ranks_die_with_the_process_that_called_run_local(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", SCRIPT, "launch_sleepers", str(tmp_path)], env=clean_environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks = pids(tmp_path)
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in ranks)


def test_run_local_passes_signals_on(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", SCRIPT, "launch_sleepers", str(tmp_path)], env=clean_environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks = pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert all(gone(pid) for pid in ranks)


def test_run_local_returns_the_exit_code_of_the_rank_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_local(2, ["fail", "2"], module=SCRIPT) == 2
    assert "ChildFailedError" not in capfd.readouterr().err


def test_run_local_refuses_no_ranks() -> None:
    with pytest.raises(UserError, match="at least 1"):
        run_local(0, [])
