"""What training holds, given up between phases and brought back as it was.

The optimizer's state and fp32 main parameters, and on request the parameters, move to the host: pinned memory where a GPU computes,
an unnamed file where the CPU does (its memory is the host's). Gradients are freed, and zero when they come back. Every tensor and
every view stays what it is: only the bytes behind it go.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from parallel.memory import give_back_freed

Part = Literal["optimizer", "gradients", "parameters"]
TRAINED: tuple[Part, ...] = ("optimizer", "gradients")
Storage = torch.UntypedStorage


class Offload:
    """The host's copy of what a `TrainingModel` holds. Parts are given up and restored as a whole; asking twice is no fault.

    `directory` is where a CPU run's file lies (None: the system's place for temporary files).
    """

    def __init__(self, training: Any) -> None:
        self._training = training
        self._away: dict[Part, list[tuple[Storage, int]]] = {}
        self._spills: dict[Part, _File | _Pinned] = {}

    @property
    def away(self) -> tuple[Part, ...]:
        """What is given up now."""
        return tuple(self._away)

    def require(self, *parts: Part) -> None:
        """Raise RuntimeError where one of `parts` is given up: its tensors have no bytes."""
        if gone := [part for part in parts if part in self._away]:
            raise RuntimeError(f"the {' and '.join(gone)} of this model are offloaded; restore them before they are used")

    def bytes(self, part: Part) -> int:
        """Bytes of one part on this rank, here or away."""
        return sum(n for _, n in self._away[part]) if part in self._away else sum(s.nbytes() for s in self._storages(part))

    def offload(self, parts: Iterable[Part], directory: str | Path | None = None) -> int:
        """Give up `parts`; returns how many bytes that was."""
        freed = 0
        for part in parts:
            if part in self._away:
                continue
            if part == "gradients" and self._training.optimizer is not None:
                self._training.optimizer.zero_grad()  # main parameters refer to them
            storages = list(self._storages(part))
            if part != "gradients" and storages:
                if part not in self._spills:
                    self._spills[part] = _Pinned() if self._training.device.type == "cuda" else _File(directory)
                self._spills[part].save(storages)
            self._away[part] = [(storage, storage.nbytes()) for storage in storages]
            for storage, size in self._away[part]:
                storage.resize_(0)
                freed += size
        if freed:
            give_back_freed()
        return freed

    def restore(self, parts: Iterable[Part]) -> None:
        """Bring `parts` back: optimizer and parameters bit by bit as they were, gradients as zeros."""
        for part in parts:
            if part not in self._away:
                continue
            storages = self._away.pop(part)
            for storage, size in storages:
                storage.resize_(size)
                if part == "gradients":
                    _as_bytes(storage).zero_()
            if part != "gradients" and storages:
                self._spills[part].load([storage for storage, _ in storages])

    def _storages(self, part: Part) -> Iterator[Storage]:
        """The memory of one part, each once, in an order that does not change while it is away."""
        return _once(getattr(self, f"_{part}_tensors")())

    def _parameters_tensors(self) -> Iterator[Tensor]:
        return (p.data for module in self._training.modules for p in module.parameters())

    def _gradients_tensors(self) -> Iterator[Tensor]:
        return (buffer.grad_data for chunk in self._training.chunks for buffer in _buffers(chunk))

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Moments and main parameters that are not (pieces of) the model's own: fp32 models have no others."""
        own = {s.data_ptr() for s in (*self._storages("parameters"), *self._storages("gradients"))}
        for each in _optimizers(self._training.optimizer):
            held = [*(v for state in each.state.values() for v in state.values()), *(p.data for g in each.param_groups for p in g["params"])]
            yield from (t for t in held if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in own)


def _optimizers(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside Megatron's; a rank that trains nothing has none."""
    if optimizer is not None:
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            if each.optimizer is not None:
                yield each.optimizer


def _buffers(chunk: Any) -> list[Any]:
    return [*getattr(chunk, "buffers", []), *getattr(chunk, "expert_parallel_buffers", [])] if hasattr(chunk, "bucket_groups") else []


def _once(tensors: Iterable[Tensor]) -> Iterator[Storage]:
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _as_bytes(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


class _Pinned:
    """Page-locked host memory, made once and kept: making it takes longer than the copies."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def save(self, storages: list[Storage]) -> None:
        if [c.numel() for c in self._copies] != [s.nbytes() for s in storages]:
            self._copies = [torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=True) for s in storages]
        for copy, storage in zip(self._copies, storages, strict=True):
            copy.copy_(_as_bytes(storage), non_blocking=True)
        torch.cuda.synchronize()

    def load(self, storages: list[Storage]) -> None:
        for copy, storage in zip(self._copies, storages, strict=True):
            _as_bytes(storage).copy_(copy, non_blocking=True)
        torch.cuda.synchronize()


class _File:
    """A file without a name: it is gone with the process, however that ends."""

    def __init__(self, directory: str | Path | None) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=0)

    def save(self, storages: list[Storage]) -> None:
        self._file.seek(0)
        for storage in storages:
            _whole(self._file.write, storage)

    def load(self, storages: list[Storage]) -> None:
        self._file.seek(0)
        for storage in storages:
            _whole(self._file.readinto, storage)  # type: ignore[attr-defined]


def _whole(move: Any, storage: Storage) -> None:
    """Read or write all bytes: the system moves at most 2 GiB at a time."""
    # not through numpy, which would forbid to resize the storage ever after
    view, done = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B"), 0
    while done < len(view):
        moved = move(view[done:])
        if not moved:
            raise OSError(f"the file of offloaded training state ended after {done} of {len(view)} bytes")
        done += moved
