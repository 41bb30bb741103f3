"""One run directory has one live owner.

    with acquire(run_dir, wait_s=60) as lease:      # collective: all ranks
        ...
        lease.check()                                # before each publish

Three files in `run_dir/lease/`:

* `owner.lock`  exclusive lock of rank 0: who holds it owns the run directory;
* `ranks.lock`  shared lock of every rank: a new owner takes it exclusively once, so it waits until the last old rank is gone;
* `owner.json`  who owns, for people, and the fencing token, for `check`: a number that grows with each owner.

The locks are POSIX record locks (fcntl): they vanish when their process dies in whatever way, and forked children do not
inherit them. They exclude each other between hosts where the file system has locks that span hosts (NFS 4, Lustre with
`flock`, GPFS); on one that has not, the token still stops the older owner from publishing.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from checkpoint.files import write_atomically
from checkpoint.together import CheckpointError, on_rank_zero, raise_together, rank
from parallel.errors import UserError

_POLL_S = 0.1
_SAY_EVERY_S = 15.0
_held: set[Path] = set()  # a process does not conflict with its own POSIX locks, so it must remember them


class LeaseLost(CheckpointError):
    """Another owner has taken over the run directory: this run must stop writing."""


@dataclass(frozen=True)
class Owner:
    """What `owner.json` says. `token` grows with each owner; `id` tells owners apart even where the file was deleted."""

    token: int
    host: str
    pid: int
    started: str
    id: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


@dataclass
class Lease:
    """Held by every rank of the owning run; `token` is the fencing token."""

    directory: Path
    owner: Owner
    _locks: list[int] = field(default_factory=list, repr=False)

    @property
    def token(self) -> int:
        return self.owner.token

    def check(self) -> None:
        """Raise LeaseLost where the owner on disk is no longer this run."""
        now = read_owner(self.directory.parent)
        if now != self.owner:
            raise LeaseLost(f"run directory {str(self.directory.parent)!r} is no longer owned by this run "
                            f"({self.owner}, token {self.token}) but by {now or 'nobody'} (token {now.token if now else None}); "
                            "nothing more is written there: stop this run")

    def release(self) -> None:
        """Give the locks back (the owner file stays: tokens must keep growing)."""
        while self._locks:
            os.close(self._locks.pop())
        _held.discard(self.directory)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def acquire(run_dir: str | Path, wait_s: float = 60.0, say: Callable[[str], None] = print) -> Lease:
    """Collective: take the run directory for all ranks of this world, waiting up to `wait_s` seconds for an older owner.

    Says on rank 0 that it waits and for whom. Raises UserError naming the owner when the time is up.
    """
    directory = (Path(run_dir) / "lease").resolve()
    locks: list[int] = []
    try:
        owner = on_rank_zero(lambda: _take(directory, wait_s, say, locks), f"taking the run directory {str(run_dir)!r}")
        error: BaseException | None = None
        if rank():
            try:
                locks.append(_join(directory, owner))
            except (OSError, CheckpointError) as caught:
                error = caught
        raise_together(error, f"joining the run directory {str(run_dir)!r}")
    except BaseException:
        while locks:
            os.close(locks.pop())
        raise
    _held.add(directory)
    return Lease(directory, owner, locks)


def read_owner(run_dir: str | Path) -> Owner | None:
    """The present or last owner of a run directory, None where there has been none. Raises UserError for a damaged file."""
    path = Path(run_dir) / "lease" / "owner.json"
    try:
        return Owner(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); make sure that no run uses this directory, then delete the file") from None


def _take(directory: Path, wait_s: float, say: Callable[[str], None], locks: list[int]) -> Owner:
    """Rank 0: own the directory, wait for the last rank of the previous owner, raise the token."""
    directory.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    if directory in _held:
        raise UserError(f"run directory {str(directory.parent)!r} is already owned by this process; release its lease first")
    locks.append(_lock(directory, "owner.lock", deadline, say, "is owned by", wait_s))
    locks.append(_lock(directory, "ranks.lock", deadline, say, "still has live ranks of", wait_s))
    before = read_owner(directory.parent)
    owner = Owner(1 + (before.token if before else 0), socket.gethostname(), os.getpid(),
                  time.strftime("%Y-%m-%dT%H:%M:%S%z"), uuid.uuid4().hex)
    write_atomically(directory / "owner.json", json.dumps(asdict(owner), indent=1) + "\n")
    fcntl.lockf(locks[-1], fcntl.LOCK_SH)  # from exclusive to shared, without a gap
    return owner


def _join(directory: Path, owner: Owner) -> int:
    """Other ranks: hold the shared lock, and make sure that no later owner came in before it was held."""
    lock = os.open(directory / "ranks.lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if read_owner(directory.parent) != owner:
            raise LeaseLost(f"run directory {str(directory.parent)!r} was taken over while this run was starting")
    except BaseException:
        os.close(lock)
        raise
    return lock


def _lock(directory: Path, name: str, deadline: float, say: Callable[[str], None], relation: str, wait_s: float) -> int:
    """An exclusive lock on `directory/name`, polled until `deadline`."""
    lock = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    said = -_SAY_EVERY_S
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except (BlockingIOError, PermissionError):
            pass
        owner = read_owner(directory.parent) or "another process"
        left = deadline - time.monotonic()
        if left <= 0:
            os.close(lock)
            raise UserError(f"run directory {str(directory.parent)!r} {relation} {owner}; waited {wait_s:g} s: "
                            "stop that run, wait longer, or give this one another run.dir")
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            say(f"run directory {str(directory.parent)!r} {relation} {owner}; waiting up to {left:.0f} s")
        time.sleep(min(_POLL_S, left))
