"""An engine's tensors read from a Megatron checkpoint are those read from the Hugging Face directory it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint.convert import fill, open_model, write_mcore
from checkpoint.hf import read_hf
from parallel.config import ParallelConfig
from resharding.layout import empty_tensors
from resharding.layouts import trtllm_layout
from tests.models import FAMILY_TINY, write_model


@pytest.mark.parametrize("family", FAMILY_TINY)
def test_an_engine_can_be_filled_from_megatron_files(family: str, tmp_path: Path) -> None:
    """Under TP2, with a padded vocabulary, from files cut for other sizes; what was in the tensors before is gone."""
    source = write_model(tmp_path / "hf", family, dtype="bfloat16", num_hidden_layers=2)
    with open_model("hf", source) as opened:
        write_mcore(opened, tmp_path / "mcore", ParallelConfig(tp=1, pp=2), form="megatron-lm" if family == "llama" else "mcore-rl")
    with open_model("mcore", tmp_path / "mcore") as opened:
        for rank in range(2):
            layout = trtllm_layout(opened.model, 2, rank, rank, torch.bfloat16)
            want, have = empty_tensors(layout, torch.device("cpu")), empty_tensors(layout, torch.device("cpu"))
            for tensor in have.values():
                tensor.fill_(7.0)
            read_hf(source, layout, want, opened.model)
            fill(opened, layout, have)
            assert all(torch.equal(want[name].view(torch.uint8), have[name].view(torch.uint8)) for name in want)
