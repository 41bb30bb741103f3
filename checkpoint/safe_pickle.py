"""Reading what others pickled without running what others wrote: known plain types are made, anything else becomes a placeholder."""

from __future__ import annotations

import argparse
import collections
import io
import pathlib
import pickle
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from parallel.errors import UserError

_METADATA = {(m.__name__, name): getattr(m, name) for m, names in (
    (metadata, ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
                "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (filesystem, ("_StorageInfo",))) for name in names}
_PLAIN = {("collections", "OrderedDict"): collections.OrderedDict, ("argparse", "Namespace"): argparse.Namespace, ("torch", "Size"): torch.Size,
          ("torch.serialization", "_get_layout"): torch.serialization._get_layout, ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
          ("pathlib", "PosixPath"): pathlib.PurePosixPath, ("pathlib._local", "PosixPath"): pathlib.PurePosixPath, ("builtins", "set"): set,
          ("types", "SimpleNamespace"): types.SimpleNamespace}


class Placeholder:
    """Stands for an object whose class is not known: it was not made, and nothing of it was called."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """What pickle calls to fill a list; `__setitem__` does so for a dictionary and `add` for a set."""

    add = append


def _known(module: str, name: str) -> Any:
    found = _METADATA.get((module, name)) or _PLAIN.get((module, name))
    if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _known(module, name) or type(name, (Placeholder,), {"__module__": module})


def read_metadata(directory: Path) -> metadata.Metadata:
    """The `.metadata` of a `torch_dist` checkpoint. Raises UserError where it is missing or damaged."""
    path = directory / ".metadata"
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        return found
    except FileNotFoundError:
        raise UserError(f"{str(directory)!r} is no complete torch_dist checkpoint: .metadata is missing, which is written last; "
                        "give a directory that was written whole") from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise UserError(f"{path} cannot be read: {error}; the checkpoint is damaged, or not a torch_dist checkpoint") from None


def load_common(path: Path) -> dict[str, Any]:
    """A `common.pt` (or another file of torch.save): a dictionary, in which objects of unknown classes are placeholders.

    Raises UserError where it is missing or damaged.
    """
    module = types.SimpleNamespace(Unpickler=_Unpickler, load=lambda file, **kwargs: _Unpickler(file, **kwargs).load(), __name__="safe_pickle")
    try:
        found = torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; give a checkpoint that was written whole") from None
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error}; the checkpoint is damaged") from None
    return dict(found) if isinstance(found, dict) else {}
