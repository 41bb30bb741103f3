"""The files of a `torch_dist` checkpoint: read without running what is in them, and written as torch itself does."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.safe_pickle import Placeholder, load_common, read_metadata
from checkpoint.torch_archive import after_values, before_values, find_values
from checkpoint.torch_dist import TorchDistFiles
from checkpoint.torch_dist_writer import combined
from parallel.errors import UserError
from tests.checkpoint.conversion import store


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(num_layers=2, other=Evil(tmp_path / "owned"))}, tmp_path / "common.pt")
    loaded = load_common(tmp_path / "common.pt")
    assert loaded["args"].num_layers == 2 and isinstance(loaded["args"].other, Placeholder)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(UserError, match="cannot be read"):
        read_metadata(tmp_path)
    assert not (tmp_path / "owned").exists()
    torch.load(tmp_path / "common.pt", weights_only=False)
    assert (tmp_path / "owned").exists()  # it is what it is meant to be


@pytest.mark.parametrize("tensor", [torch.arange(24.0).view(2, 3, 4), torch.ones(7, dtype=torch.bfloat16), torch.tensor(3.5), torch.zeros(3, 0),
                                    torch.arange(5), torch.ones(2, 3, dtype=torch.float16)], ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_an_archive_is_what_torch_save_writes(tensor: torch.Tensor) -> None:
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    ours = before_values(tensor.dtype, tuple(tensor.shape)) + raw + after_values(tensor.dtype, tuple(tensor.shape), zlib.crc32(raw))
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape and torch.equal(loaded, tensor)
    assert zipfile.ZipFile(io.BytesIO(ours)).testzip() is None
    torchs = io.BytesIO()
    torch.save(tensor, torchs)
    for data in (ours, torchs.getvalue()):
        found = find_values(io.BytesIO(data))
        assert found is not None and (found.dtype, found.shape) == (tensor.dtype, tuple(tensor.shape))
        assert data[found.start:found.start + len(raw)] == raw and found.start % 64 == 0


def test_tensors_that_are_not_plain_are_left_to_torch_load(tmp_path: Path) -> None:
    transposed, data = torch.arange(12.0).view(3, 4).t(), io.BytesIO()
    torch.save(transposed, data)
    assert find_values(data) is None
    part = io.BytesIO()
    torch.save(torch.arange(12.0).view(3, 4)[1:2], part)  # torch writes the whole storage
    found = find_values(part)
    assert found is not None and part.getvalue()[found.start:found.start + 16] == torch.arange(4.0, 8.0).numpy().tobytes()
    with pytest.raises(ValueError):
        find_values(io.BytesIO(b"no archive at all"))
    held = {"transposed": transposed, "plain": torch.arange(6.0)}
    store(tmp_path / "w", held)
    with TorchDistFiles(tmp_path / "w") as files:
        assert torch.equal(files["transposed"][0:4, 1:3], transposed[:, 1:3]) and torch.equal(files["plain"][2:5,], torch.arange(2.0, 5.0))


def test_checksums_of_parts_give_that_of_the_whole() -> None:
    data = os.urandom(100_003)
    for at in (0, 1, 63, 4096, 99_999, len(data)):
        assert combined(zlib.crc32(data[:at]), zlib.crc32(data[at:]), len(data) - at) == zlib.crc32(data)
