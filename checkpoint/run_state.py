"""The checkpoints of a run directory: their names, which is the newest whole one, and which are deleted.

    run_dir/checkpoints/step_000010/...            a published checkpoint: complete by its manifest.json
    run_dir/checkpoints/latest                     text: the name of the one published last, for people and other tools
    run_dir/checkpoints/.tmp-step_000020-<token>/  one being written (or left by a crash)

"Newest" is by publication: every manifest carries a sequence number that grows with each publish. By step number it would
be wrong after a resume from an older checkpoint (a branch). `latest` is checked, and where it disagrees a warning says so.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from checkpoint.files import MANIFEST, find_digest_damage, find_size_damage, read_manifest, write_atomically
from checkpoint.together import gather, on_rank_zero, rank, world_size
from parallel.errors import UserError

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d+)")
_SET_ASIDE = re.compile(r"\.old-(step_\d+)-\d+")
STATE = "run.json"


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint directory name, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def checkpoints_of(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def numbered(run_dir: str | Path) -> list[Path]:
    """Checkpoint directories by step number, highest first; nothing says that they are complete."""
    root = checkpoints_of(run_dir)
    found = [path for path in root.iterdir() if step_of(path.name) is not None and path.is_dir()] if root.is_dir() else []
    return sorted(found, key=lambda path: (step_of(path.name), path.name), reverse=True)


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Rank 0's small facts of a checkpoint (step, data position, ...), as JSON in `run.json`."""
    write_atomically(directory / STATE, json.dumps(state, indent=1, sort_keys=True) + "\n")


def read_state(directory: Path) -> dict[str, Any]:
    """What `write_state` wrote. Raises UserError where it is missing or damaged."""
    try:
        return dict(json.loads((directory / STATE).read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {directory}: {STATE} cannot be read: {error}; resume from another checkpoint") from None


def find_damage(directory: Path) -> str | None:
    """Why a checkpoint cannot be used, None where every file is as its manifest says.

    Collective where torch.distributed is initialised: each rank reads its share of the files.
    """
    manifest = on_rank_zero(lambda: read_manifest(directory), f"reading {directory / MANIFEST}")
    if isinstance(manifest, str):
        return manifest
    files = manifest["files"]
    damage = on_rank_zero(lambda: find_size_damage(directory, files), f"reading {directory}")
    if damage:
        return damage
    mine = sorted(files)[rank()::world_size()]
    return next((found for found in gather(find_digest_damage(directory, files, mine)) if found), None)


def verify(directory: str | Path) -> Path:
    """The directory of a checkpoint the user asked for. Raises UserError where it is damaged. Collective like `find_damage`."""
    path = Path(directory)
    if not path.is_dir():
        raise UserError(f"checkpoint {str(directory)!r} does not exist; give a directory like .../checkpoints/{step_name(10)}")
    damage = find_damage(path)
    if damage:
        raise UserError(f"checkpoint {str(directory)!r} is not complete: {damage}; resume from another one, "
                        "or let the run choose (it takes the newest complete one)")
    return path


def find_latest(run_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run directory; None where it holds no checkpoint at all.

    Collective where torch.distributed is initialised. Damaged ones are passed over with a warning that names step and
    reason. Raises UserError where there are checkpoints and none is complete: a run never starts over silently.
    """
    candidates = on_rank_zero(lambda: _by_publication(run_dir), f"looking for checkpoints in {str(run_dir)!r}")
    reasons: list[str] = []
    for directory in candidates:
        damage = find_damage(directory)
        if damage is None:
            _compare_with_pointer(run_dir, directory)
            return directory
        reasons.append(f"{directory.name}: {damage}")
        _warn(f"checkpoint {directory.name} (step {step_of(directory.name)}) is passed over: {damage}")
    if reasons:
        raise UserError(f"run directory {str(run_dir)!r} holds checkpoints but none is complete ({'; '.join(reasons)}); "
                        "restore one, or start over in another run.dir (or move the checkpoints away)")
    return None


def resume_point(run_dir: str | Path, resume_from: str | Path | None = None) -> Path | None:
    """Collective, as the owner: clean up after a crash, then the checkpoint to resume from (None: start at step 0).

    `resume_from` asks for one checkpoint directory, which must be complete.
    """
    on_rank_zero(lambda: clean_leftovers(run_dir), f"cleaning up {str(run_dir)!r}")
    return verify(resume_from) if resume_from else find_latest(run_dir)


def _warn(message: str) -> None:
    if rank() == 0:
        logger.warning(message)


def sequence_of(directory: Path) -> int:
    """Publication number, -1 where the manifest cannot be read."""
    manifest = read_manifest(directory)
    return -1 if isinstance(manifest, str) else int(manifest.get("sequence", 0))


def _by_publication(run_dir: str | Path) -> list[Path]:
    """Newest publication first. One without a readable manifest stands where its step number would put it."""
    order: list[tuple[int, int, Path]] = []
    newest = 0
    for directory in reversed(numbered(run_dir)):
        sequence = sequence_of(directory)
        newest = max(newest, sequence)
        order.append((sequence if sequence >= 0 else newest, step_of(directory.name) or 0, directory))
    return [directory for _, _, directory in sorted(order, reverse=True)]


def _compare_with_pointer(run_dir: str | Path, chosen: Path) -> None:
    """Warn where `latest` names something else (empty, missing, an older one after a crash between rename and update)."""
    try:
        text = (checkpoints_of(run_dir) / "latest").read_text().strip()
    except OSError:
        text = ""
    named = step_name(int(text)) if text.isdecimal() else text
    if named != chosen.name:
        _warn(f"{checkpoints_of(run_dir) / 'latest'} names {text!r}; the newest complete checkpoint is {chosen.name}: it is used")


def clean_leftovers(run_dir: str | Path) -> list[str]:
    """Remove what crashes left (`.tmp-*`, `.trash-*`, `.old-*`) and return the names. Call as the owner, on one rank.

    An `.old-*` directory whose successor never arrived is put back under its name.
    """
    root = checkpoints_of(run_dir)
    removed = []
    for path in sorted(root.glob(".*")) if root.is_dir() else []:
        aside = _SET_ASIDE.fullmatch(path.name)
        if aside and not (root / aside[1]).exists():
            path.rename(root / aside[1])
            logger.warning("checkpoint %s was being replaced when the run died: the older one is back in place", aside[1])
        elif path.is_symlink():
            path.unlink()
        elif path.is_dir() and path.name.startswith((".tmp-", ".trash-", ".old-")):
            _remove(path)
            removed.append(path.name)
        elif path.is_file() and path.name.startswith(".") and path.name.endswith(".tmp"):
            path.unlink(missing_ok=True)
    return removed


def keep_newest(run_dir: str | Path, keep: int | None, protect: tuple[str, ...] = ()) -> list[str]:
    """Delete all but the `keep` complete checkpoints of the highest steps; returns the names deleted. Call on one rank.

    None or a negative number keeps all; 0 raises UserError. The one published last and those named in `protect` (the one
    resumed from) stay in any case. Only directories named `step_<number>` are ever touched; of a symbolic link only the
    link is removed; a deletion that fails is a warning. Damaged ones do not count, and go with the old ones.
    """
    if keep is None or keep < 0:
        return []
    if keep == 0:
        raise UserError("checkpoint.keep is 0, which would delete every checkpoint; use 1 or more, or null to keep all")
    present = numbered(run_dir)
    complete = [path for path in present if _looks_complete(path)]
    if len(complete) <= keep:
        return []
    newest = max(complete, key=sequence_of)
    kept = {path.name for path in complete[:keep]} | {newest.name, *protect}
    oldest = step_of(complete[keep - 1].name) or 0
    if newest not in complete[:keep]:
        logger.warning("checkpoint %s is the newest, but steps up to %s of an earlier branch are kept too; delete them by hand to keep %d",
                       newest.name, complete[0].name, keep)
    doomed = [path for path in present if path.name not in kept and (step_of(path.name) or 0) <= oldest]
    return [path.name for path in doomed if _delete(path)]


def _looks_complete(directory: Path) -> bool:
    """By manifest and sizes; contents are read only on resume."""
    manifest = read_manifest(directory)
    return not isinstance(manifest, str) and find_size_damage(directory, manifest["files"]) is None


def _delete(path: Path) -> bool:
    """Rename first: a half-deleted checkpoint must not stand under its name."""
    try:
        if path.is_symlink():
            path.unlink()
            return True
        trash = path.with_name(f".trash-{path.name}")
        path.rename(trash)
    except OSError as error:
        logger.warning("checkpoint %s could not be deleted: %s", path, error)
        return False
    _remove(trash)
    return True


def _remove(path: Path) -> None:
    shutil.rmtree(path, onerror=lambda _, name, info: logger.warning("%s could not be deleted: %s", name, info[1]))
