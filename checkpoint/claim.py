"""One writer at a time makes a directory: a temporary sibling of a fixed name, which the next writer takes over from a killed one.

    DIR/.tmp-NAME-0        what is being written
    DIR/.tmp-NAME-0.lock   locked by who writes it; removed at the end, and taken over where its process died
    DIR/.old-NAME-0        what was there before, between the two renames of a replacement
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclass
class Claim:
    """The right to write a directory; `temporary` is an empty one beside it. Held until `release`, or the end of the process."""

    temporary: Path
    _lock: int | None

    def release(self) -> None:
        """Remove what is left of the temporary directory and let others write. May be called again."""
        if self._lock is None:
            return
        shutil.rmtree(self.temporary, ignore_errors=True)
        _lock_path(self.temporary).unlink(missing_ok=True)  # while it is locked: who opened it meanwhile finds that it is gone
        os.close(self._lock)
        self._lock = None


def claim(target: Path) -> Claim:
    """Claim the writing of `target`, an absolute path, and make the temporary directory. What a killed writer left is cleared up:
    its half-written files are removed, and a directory that it was about to replace is put back.

    Raises UserError that names the target and its writer where that is alive.
    """
    temporary, aside = target.with_name(f".tmp-{target.name}-0"), target.with_name(f".old-{target.name}-0")
    target.parent.mkdir(parents=True, exist_ok=True)
    held = Claim(temporary, _locked(_lock_path(temporary), target))
    try:
        if aside.exists() and target.exists():
            shutil.rmtree(aside)
        elif aside.exists():
            aside.rename(target)
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
    except BaseException:
        held.release()
        raise
    return held


def _lock_path(temporary: Path) -> Path:
    return temporary.with_name(temporary.name + ".lock")


def _locked(path: Path, target: Path) -> int:
    """The open, locked file. A lock of its opening, not of the process: two threads exclude each other too."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                owner = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    raise
                raise UserError(f"output directory {str(target)!r} is being written by {owner}; wait for its end, or give another directory") from None
            logger.warning("%s: the file system has no locks; make sure that nothing else writes %s", path, target)
        try:
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)  # its last owner has just removed it
