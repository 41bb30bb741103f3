"""A directory appears whole or not at all.

    with publishing(run_dir, step=10, lease=lease) as directory:     # collective: all ranks
        ...                                                          # each rank writes its files into `directory`

Order: every rank's files, synced; the manifest (size and digest of each file), synced; the lease is checked; rename; `latest`.
A crash before the rename leaves a `.tmp-` directory that is no checkpoint, one after it a checkpoint that is found by its
manifest. An error on any rank is raised on all ranks and leaves what was published before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoint.files import MANIFEST, digest, list_files, sync_directory, sync_file, write_atomically
from checkpoint.lease import Lease
from checkpoint.run_state import checkpoints_of, numbered, sequence_of, step_name
from checkpoint.together import catchable, gather, on_rank_zero, raise_together, rank, world_size

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def publishing(run_dir: str | Path, step: int, lease: Lease | None = None) -> Iterator[Path]:
    """Collective: yields the directory to write checkpoint `step` into; on leaving, it is published as the latest.

    Raises CheckpointError (UserError stays one) on every rank when any rank fails.
    """
    root = checkpoints_of(run_dir)
    token = lease.token if lease else 0
    check = lease.check if lease else lambda: None
    sequence = on_rank_zero(lambda: 1 + max(map(sequence_of, numbered(run_dir)), default=0), f"publishing step {step}")
    with whole_directory(root / step_name(step), token, {"step": step, "sequence": sequence}, check) as directory:
        yield directory
    on_rank_zero(lambda: _point(root, step, check), f"pointing {root / 'latest'} at step {step}")


def _point(root: Path, step: int, check: Callable[[], None]) -> None:
    check()
    write_atomically(root / "latest", step_name(step) + "\n")


@contextlib.contextmanager
def whole_directory(final: Path, token: int = 0, facts: dict[str, Any] | None = None, check: Callable[[], None] = lambda: None,
                    known: Mapping[str, tuple[int, int]] | None = None) -> Iterator[Path]:
    """Collective: yields a temporary directory beside `final`; on leaving, it becomes `final`, with a manifest.

    `facts` go into the manifest; `check` runs on rank 0 right before the rename and may refuse by raising. `known` is looked at
    on leaving: size and CRC-32 of files that this rank wrote and synced itself, which are not read again.
    """
    temporary = final.parent / f".tmp-{final.name}-{token}"
    doing = f"writing {final}"
    on_rank_zero(lambda: _make(temporary), doing)
    error: BaseException | None = None
    try:
        yield temporary
    except catchable() as caught:
        error = caught
    try:
        raise_together(error, doing)
        files = _describe_files(temporary, doing, known or {})
        on_rank_zero(lambda: _finish(temporary, final, token, files, facts or {}, check), doing)
    except catchable():
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # the error that is on its way says more; the next start cleans up
        raise


def _make(temporary: Path) -> None:
    if temporary.exists():  # left by this token's own failed attempt
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)


def _describe_files(directory: Path, doing: str, known: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Sync every file and take its size and digest: the work is shared out over the ranks."""
    names = on_rank_zero(lambda: list_files(directory), doing)
    mine: dict[str, Any] = {name: {"bytes": size, "digest": f"crc32:{crc:08x}"} for name, (size, crc) in known.items()}
    theirs = {name for part in gather(list(mine)) for name in part}
    error: BaseException | None = None
    try:
        for name in [name for name in names if name not in theirs][rank()::world_size()]:
            sync_file(directory / name)
            size, found = digest(directory / name)
            mine[name] = {"bytes": size, "digest": found}
    except OSError as caught:
        error = caught
    raise_together(error, doing)
    return {name: entry for part in gather(mine) for name, entry in part.items()}


def _finish(temporary: Path, final: Path, token: int, files: dict[str, Any], facts: dict[str, Any], check: Callable[[], None]) -> None:
    """Rank 0: manifest last, then rename."""
    for directory in [path for path in temporary.rglob("*") if path.is_dir()]:
        sync_directory(directory)
    manifest = {**facts, "token": token, "world_size": world_size(), "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "files": dict(sorted(files.items()))}
    write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    check()
    aside = final.parent / f".old-{final.name}-{token}"
    if final.exists() or final.is_symlink():
        logger.warning("%s exists already and is replaced", final)
        os.rename(final, aside)
    os.rename(temporary, final)
    sync_directory(final.parent)
    if aside.is_symlink():
        aside.unlink()
    elif aside.exists():
        shutil.rmtree(aside, ignore_errors=True)


def save_rank_file(directory: Path, name: str, value: Any) -> Path:
    """This rank's own file `name.rank00003.pt` (torch.save). Read it with `load_rank_file`."""
    import torch

    path = rank_file(directory, name)
    with open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    return path


def load_rank_file(directory: Path, name: str) -> Any | None:
    """This rank's own file, tensors and plain values only; None where the checkpoint has none for this rank."""
    import torch

    path = rank_file(directory, name)
    return torch.load(path, weights_only=True, map_location="cpu") if path.is_file() else None


def rank_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.rank{rank():05d}.pt"
