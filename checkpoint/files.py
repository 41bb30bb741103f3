"""Files that survive a crash: written, synced, then renamed; and the manifest that tells a whole directory from a part."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_BLOCK = 1 << 22


def sync_directory(directory: Path) -> None:
    """Make names in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader, also after a crash, finds the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def replace_directory(temporary: Path, target: Path) -> None:
    """Put a finished directory of files in the place of `target`: files on disk first, then one rename; what was there goes last."""
    for path in temporary.iterdir():
        sync_file(path)
    sync_directory(temporary)
    old = temporary.with_name(temporary.name.replace(".tmp-", ".old-", 1))
    replaced = target.is_dir() and any(target.iterdir())
    if replaced:
        target.rename(old)
    temporary.rename(target)
    sync_directory(target.parent)
    if replaced:
        shutil.rmtree(old)


def digest(path: Path) -> tuple[int, str]:
    """Size in bytes and CRC-32 of a file.

    CRC-32 (3.4 GB/s here) finds any single damaged run of up to 32 bits and other damage with 1 - 2^-32; blake2b (0.7 GB/s)
    and sha256 (1.5 GB/s) would guard against forgery, which is not the danger.
    """
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return size, f"crc32:{crc:08x}"


def list_files(directory: Path) -> list[str]:
    """Paths of all files below `directory`, relative and sorted, without the manifest itself."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def read_manifest(directory: Path) -> dict[str, Any] | str:
    """The manifest of a directory, or the reason why it has none that can be read.

    A role's directory in a checkpoint has its part of the checkpoint's.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        return _part_of_manifest(directory) or f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return f"{MANIFEST} lists no files"
    return manifest


def _part_of_manifest(directory: Path) -> dict[str, Any] | None:
    if not (directory.parent / MANIFEST).is_file():
        return None
    whole, prefix = read_manifest(directory.parent), f"{directory.name}/"
    files = {} if isinstance(whole, str) else {name.removeprefix(prefix): entry for name, entry in whole["files"].items() if name.startswith(prefix)}
    return {**whole, "files": files} if files and not isinstance(whole, str) else None


def find_size_damage(directory: Path, files: dict[str, Any]) -> str | None:
    """The first listed file that is missing or has another size, as a reason; None where all are there."""
    for name, entry in sorted(files.items()):
        try:
            size = (directory / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry["bytes"]:
            return f"{name} has {size} bytes instead of {entry['bytes']}"
    return None


def find_digest_damage(directory: Path, files: dict[str, Any], names: list[str]) -> str | None:
    """The first of `names` whose content is not what the manifest says, as a reason."""
    for name in names:
        try:
            size, found = digest(directory / name)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if size != files[name]["bytes"] or found != files[name]["digest"]:
            return f"{name} has changed: {found} over {size} bytes instead of {files[name]['digest']} over {files[name]['bytes']}"
    return None
