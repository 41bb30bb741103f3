"""Shared fixtures. Distributed tests use `tests.worker_pool.run_ranks`; small models are made on the fly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def stories260k() -> Path | None:
    """The real 260K-parameter llama where it is at hand, else None (tests then run on random models only)."""
    path = SHARED / "assets/models/stories260K-hf"
    return path if path.is_dir() else None
