"""The script for machines with TensorRT-LLM: it says that it cannot run here, and its checks pass on the fake and fail on a faulty one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import trtllm_smoke
from tests.models import write_model
from tests.trtllm_rollout.driver.api import api
from tests.trtllm_rollout.driver.fake_tensorrt_llm import fake_tensorrt_llm
from trtllm_rollout.driver import placement
from trtllm_rollout.driver.options import DriverOptions

OPTIONS = DriverOptions(start_timeout_s=60, update_timeout_s=60, generate_timeout_s=60)


@contextmanager
def session(directory: Path, **fake: Any) -> Iterator[tuple[trtllm_smoke.Session, trtllm_smoke.Report]]:
    write_model(directory, "llama", num_hidden_layers=1)
    with fake_tensorrt_llm(api("1.3.0rc15"), **fake), mock.patch.object(placement, "gpu_uuid", lambda device: "0"):
        yield trtllm_smoke.open_session(directory, torch.float32, torch.device("cpu"), 0, 1), trtllm_smoke.Report()


def test_without_tensorrt_llm_it_says_so_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert trtllm_smoke.main(["--model", "anything"]) == 2
    assert "tensorrt_llm is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("owner", ["ray", "inprocess"])
def test_the_checks_of_weights_pass(tmp_path: Path, owner: str, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path) as (s, report):
        trtllm_smoke.check_weights(s, replace(OPTIONS, owner=owner), report)
    assert not report.failed and capsys.readouterr().out.count("pass") == 7


def test_the_checks_see_a_sampler_that_cuts_stop_tokens(tmp_path: Path) -> None:
    with session(tmp_path, cut_stops=True) as (s, report), pytest.raises(Exception, match="left the stop token out"):
        trtllm_smoke.check_weights(s, OPTIONS, report)


@pytest.mark.slow
def test_the_checks_of_sampling_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path) as (s, report):
        trtllm_smoke.all_checks(s, OPTIONS, report)
    assert not report.failed and "does NOT give" not in capsys.readouterr().out


def test_the_interface_is_written_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "snapshot.json"
    with fake_tensorrt_llm(api("1.3.0rc15")):
        assert trtllm_smoke.main(["--write-snapshot", str(file), "--compare", str(file)]) == 0
        assert "is as recorded" in capsys.readouterr().out
        recorded = json.loads(file.read_text())
        assert recorded["version"] == "1.3.0rc15" and "min_p" in recorded["classes"]["tensorrt_llm.SamplingParams"]["fields"]
        recorded["classes"]["tensorrt_llm.SamplingParams"]["fields"]["colour"] = {}
        del recorded["classes"]["tensorrt_llm.LLM"]["init_args"]["load_format"]
        file.write_text(json.dumps(recorded))
        assert trtllm_smoke.main(["--compare", str(file)]) == 1
        out = capsys.readouterr().out
    assert "SamplingParams.fields: without colour" in out and "LLM.init_args: new load_format" in out
