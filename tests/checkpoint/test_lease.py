"""One run directory has one live owner, whatever dies and however."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from checkpoint.lease import LeaseLost, acquire, read_owner
from checkpoint.publish import publishing
from checkpoint.run_state import find_latest
from checkpoint.together import CheckpointError
from parallel.errors import UserError
from tests.checkpoint import writers
from tests.worker_pool import run_ranks


def start(*arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A process of `writers` and the words of its first line."""
    process = subprocess.Popen([sys.executable, "-m", "tests.checkpoint.writers", *arguments], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def test_second_owner_is_told_whom_it_waits_for_and_is_refused(tmp_path: Path) -> None:
    first, (_, token, _) = start("hold", str(tmp_path), "alone")
    said: list[str] = []
    with pytest.raises(UserError, match=f"is owned by process {first.pid} on .*waited 0.5 s.*another run.dir"):
        acquire(tmp_path, wait_s=0.5, say=said.append)
    assert len(said) == 1 and f"process {first.pid}" in said[0] and "waiting up to" in said[0]
    assert json.loads((tmp_path / "lease/owner.json").read_text())["pid"] == first.pid
    first.kill()
    first.wait()
    with acquire(tmp_path, wait_s=5) as lease:
        assert lease.token == int(token) + 1


def test_second_owner_gets_the_directory_when_the_first_is_killed(tmp_path: Path) -> None:
    """Also when the dead owner has left a forked child behind: locks are not inherited."""
    first, (_, _, child) = start("hold", str(tmp_path), "forked")
    timer = threading.Timer(0.5, first.kill)
    timer.start()
    began = time.monotonic()
    with acquire(tmp_path, wait_s=20, say=lambda text: None):
        assert 0.4 < time.monotonic() - began < 10
    first.wait()
    os.kill(int(child), signal.SIGKILL)


def test_new_owner_waits_for_the_last_rank_of_the_old_one(tmp_path: Path) -> None:
    acquire(tmp_path).release()
    orphan, _ = start("hold_as_rank", str(tmp_path))
    with pytest.raises(UserError, match="still has live ranks of process"):
        acquire(tmp_path, wait_s=0.3, say=lambda text: None)
    orphan.kill()
    orphan.wait()
    acquire(tmp_path, wait_s=5).release()


def test_an_owner_that_lost_its_lease_cannot_publish(tmp_path: Path) -> None:
    """Where locks do not work between hosts, the token still protects: the older owner's publish fails."""
    with acquire(tmp_path) as lease:
        writers.save(str(tmp_path), 1, lease=lease)
        record = json.loads((tmp_path / "lease/owner.json").read_text())
        (tmp_path / "lease/owner.json").write_text(json.dumps({**record, "token": record["token"] + 1, "host": "elsewhere", "id": "other"}))
        with pytest.raises(LeaseLost, match="process .* on elsewhere"):
            lease.check()
        with pytest.raises(CheckpointError, match="LeaseLost"), publishing(tmp_path, 2, lease) as directory:
            (directory / "file").write_text("x")
        latest = find_latest(tmp_path)
        assert latest is not None and latest.name == "step_000001" and not list((tmp_path / "checkpoints").glob("step_000002"))


def test_all_ranks_hold_the_lease_and_learn_of_a_refusal(tmp_path: Path) -> None:
    for said in run_ranks(3, writers.lease_and_collide, str(tmp_path)):
        assert said[0] == "1" and "already owned by this process" in said[1] and said[2] == "2"


def test_a_damaged_owner_file_is_reported(tmp_path: Path) -> None:
    acquire(tmp_path).release()
    (tmp_path / "lease/owner.json").write_text('{"token": 3')
    with pytest.raises(UserError, match="owner.json is damaged"):
        read_owner(tmp_path)
