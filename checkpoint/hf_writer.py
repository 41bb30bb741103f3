"""Writing a Hugging Face directory tensor by tensor: the headers first, then bytes at their places, published whole.

    with HFWriter(directory, hf_layout(model, dtype), model, dtype) as writer:
        for local in writer.layout.tensors:
            writer.write(local.name, tensor)        # may be dropped at once
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.claim import Claim, claim
from checkpoint.hf_config import write_companions
from checkpoint.hf_files import INDEX, SINGLE
from checkpoint.safetensors_format import Entry, file_size, make_header
from parallel.errors import UserError
from parallel.model_config import ModelConfig
from resharding.agreement import Step, together
from resharding.errors import WeightsError, listed
from resharding.layout import Layout

# what a Hugging Face model directory is made of; only such files are ever replaced
_MODEL_FILES = re.compile(r"(config|generation_config|tokenizer\w*|special_tokens_map|added_tokens|vocab|chat_template|preprocessor_config)\.json"
                          r"|model.*\.safetensors(\.index\.json)?|merges\.txt|tokenizer\.model|.*\.tiktoken|chat_template\.jinja"
                          r"|additional_chat_templates|(configuration|modeling|tokenization)_\w+\.py|LICENSE.*|README\.md|NOTICE.*")
WRITE_BYTES = 32 << 20  # of one call, and before the disk is set to work


def check_writable(directory: str | Path, overwrite: bool = False) -> None:
    """Raise UserError where `directory` cannot be made, or holds something: anything without `overwrite`, else anything but a model.

    Overwriting replaces a Hugging Face model directory as a whole, and never a file that is not part of one.
    """
    path = Path(directory).absolute()
    blocking = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
    if blocking is not None:
        raise UserError(f"output directory {str(directory)!r} cannot be made: {str(blocking)!r} is a file; give another directory")
    held = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    if held and not overwrite:
        raise UserError(f"output directory {str(directory)!r} is not empty; give another one, or allow overwriting with --overwrite")
    foreign = [name for name in held if not _MODEL_FILES.fullmatch(name)]
    if foreign:
        raise UserError(f"output directory {str(directory)!r} holds {', '.join(foreign[:4])}, not part of a Hugging Face model; nothing is "
                        "overwritten there: choose another directory")


class HFWriter:
    """Writes the tensors of an `hf` layout. A context manager: on a clean end the directory is there, whole; else nothing is.

    Weights go to `model.safetensors`, or to shards of at most `shard_bytes` (or one tensor) with an index. `dtype` is what
    config.json says; tensors are written in the layout's dtypes. `source` is a directory to copy tokenizer and generation files
    from. With `shared`, all ranks of `group` write one directory and each may write any rows of any tensor; entering and leaving
    are collective, so an error that leaves the block on one rank must not leave another in a collective inside it. Written to a
    sibling and renamed; what a killed writer left of its sibling is removed first.
    Raises UserError where the directory cannot be written or another process is writing it, and on leaving WeightsError that names tensors which were not
    written whole or more than once.
    """

    def __init__(self, directory: str | Path, layout: Layout, model: ModelConfig, dtype: torch.dtype, source: str | Path | None = None,
                 shard_bytes: int = 5 << 30, overwrite: bool = False, shared: bool = False, group: dist.ProcessGroup | None = None) -> None:
        self.directory, self.layout, self.model, self.dtype, self.source = Path(directory), layout, model, dtype, source
        self.overwrite, self.shared, self.group = overwrite, shared, group
        self._shards = _plan_shards(layout, shard_bytes)
        self._place: dict[str, tuple[str, Entry]] = {}
        self._heads: dict[str, bytes] = {}
        self._files: dict[str, int] = {}
        self._claim: Claim | None = None  # of the rank that makes the directory
        self._folder = -1
        self._fresh: dict[str, tuple[int, int]] = {}
        self._written: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for file, tensors in self._shards.items():
            self._heads[file], entries = make_header((t.name, t.shape, t.dtype) for t in tensors)
            self._place.update((name, (file, entry)) for name, entry in entries.items())

    def write(self, name: str, tensor: Tensor, region_rows: tuple[int, int] | None = None) -> None:
        """Write a tensor of the layout, or its rows (places along dimension 0) [start, stop). Its memory may be reused at once.

        Raises WeightsError for an unknown name, another shape or another dtype.
        """
        file, entry = self._place.get(name) or _refuse(f"{name} is no tensor of the layout")
        rows = entry.shape[0] if entry.shape else 1
        start, stop = region_rows or (0, rows)
        expected = (stop - start, *entry.shape[1:]) if entry.shape else ()
        if tuple(tensor.shape) != expected or tensor.dtype != entry.dtype or not 0 <= start <= stop <= rows:
            _refuse(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, the layout says {expected} (rows {start} to {stop} "
                    f"of {rows}) and {entry.dtype}")
        self._written[name].append((start, stop))
        if tensor.numel():
            data = memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            position = entry.start + start * ((entry.stop - entry.start) // rows)
            _write_at(self._open(file), data, position)
            self._start_to_disk(file, position, position + len(data))

    def _start_to_disk(self, file: str, start: int, stop: int) -> None:
        """Let the disk begin while the next tensors are made, instead of leaving all of the work to the final fsync."""
        low, high = self._fresh.pop(file, (start, stop))
        low, high = min(low, start), max(high, stop)
        if high - low < WRITE_BYTES:
            self._fresh[file] = (low, high)
        elif hasattr(os, "posix_fadvise"):
            # DONTNEED starts the writing of dirty pages without waiting for it (and forgets clean ones, which nobody reads)
            os.posix_fadvise(self._files[file], low, high - low, os.POSIX_FADV_DONTNEED)

    def _open(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._folder)
        return self._files[file]

    def __enter__(self) -> HFWriter:
        try:
            with self._agreed() as step:
                if self._leads():
                    check_writable(self.directory, self.overwrite)
                    step.payload = str(self._begin())
            self._temporary = Path(next(payload for payload in step.payloads or [step.payload] if payload))
            with self._agreed():
                if not self._temporary.is_dir():
                    raise UserError(f"output directory {str(self.directory)!r} is not on a file system that this rank shares with the first one")
                # not its name: where the first rank dies, that may soon be another writer's
                self._folder = os.open(self._temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            with self._agreed() as step:
                if error is not None:
                    raise error
                for handle in self._files.values():
                    os.fsync(handle)
                step.payload = dict(self._written)
            with self._agreed():
                if self._leads():
                    self._check_written(step.payloads or [step.payload])
                    self._publish()
        finally:
            self._close()

    def _leads(self) -> bool:
        return not self.shared or not dist.is_initialized() or dist.get_rank(self.group) == 0

    def _agreed(self) -> Any:
        return together(f"writing {str(self.directory)!r}", self.group) if self.shared else nullcontext(Step())

    def _begin(self) -> Path:
        """A sibling directory with everything but the weights, and files of their final size."""
        self._claim = claim(self.directory.absolute())
        check_writable(self.directory, self.overwrite)  # again: now nobody else writes it
        temporary = self._claim.temporary
        write_companions(temporary, self.model, str(self.dtype).removeprefix("torch."), self.source)
        for file, head in self._heads.items():
            with open(temporary / file, "wb") as handle:
                handle.write(head)
                handle.truncate(file_size(head, {n: e for n, (f, e) in self._place.items() if f == file}))
        if len(self._shards) > 1:
            index = {"metadata": {"total_size": self.layout.nbytes}, "weight_map": {n: file for n, (file, _) in self._place.items()}}
            (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return temporary

    def _check_written(self, ranks: Iterable[dict[str, list[tuple[int, int]]]]) -> None:
        regions: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for written in ranks:
            for name, rows in written.items():
                regions[name] += rows
        absent, twice = [], []
        for local in self.layout.tensors:
            position = 0
            for start, stop in sorted(regions[local.name]):
                if start != position:
                    (twice if start < position else absent).append(local.name)
                position = max(position, stop)
            if position < (local.shape[0] if local.shape else 1) or not regions[local.name]:
                absent.append(local.name)
        found = (("were not written whole:", absent), ("were written more than once:", twice))
        problems = [f"{what} {listed(names)}" for what, names in found if names]
        if problems:
            raise WeightsError(f"cannot publish {str(self.directory)!r}: tensors " + "; ".join(problems))

    def _publish(self) -> None:
        """Put the finished directory in its place: files on disk first, then one rename."""
        target = self.directory.absolute()
        for path in [*self._temporary.iterdir(), self._temporary]:
            _sync_to_disk(path)
        old = target.with_name(self._temporary.name.replace(".tmp-", ".old-", 1))
        replaced = target.is_dir() and any(target.iterdir())
        if replaced:
            target.rename(old)
        self._temporary.rename(target)
        _sync_to_disk(target.parent)
        if replaced:
            shutil.rmtree(old)

    def _close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
        if self._claim is not None:
            self._claim.release()


def _refuse(text: str) -> Any:
    raise WeightsError(f"cannot write: {text}")


def _plan_shards(layout: Layout, shard_bytes: int) -> dict[str, list[Any]]:
    """Tensors of every file, in the layout's order."""
    shards: list[list[Any]] = [[]]
    filled = 0
    for local in layout.tensors:
        if shards[-1] and filled + local.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(local)
        filled += local.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": tensors for number, tensors in enumerate(shards, 1)}


def _write_at(handle: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:done + WRITE_BYTES], position + done)


def _sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
