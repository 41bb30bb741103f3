"""Models that the tests of conversion share: making one of every family takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import FAMILY_TINY, write_model


@pytest.fixture(scope="session")
def sources(tmp_path_factory: Any) -> dict[str, Path]:
    """A small model of every family in bfloat16; two with a tied head, one with files beside its weights. Not to be changed."""
    root = tmp_path_factory.mktemp("families")
    made = {f: write_model(root / f, f, tie_word_embeddings=f in ("llama", "qwen3"), num_hidden_layers=2, dtype="bfloat16") for f in FAMILY_TINY}
    (made["qwen2"] / "tokenizer.json").write_text("{}")
    (made["qwen2"] / "chat_template.jinja").write_text("{{ messages }}")
    return made
