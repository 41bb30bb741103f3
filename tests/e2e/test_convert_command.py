"""`mcore-rl convert` as a user meets it: every direction, refusals with exit code 2, and nothing left after an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.test_command_line import ROOT, many, refused
from tests.models import write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    return write_model(tmp_path_factory.mktemp("hf") / "model", "qwen3_moe", dtype="bfloat16", num_hidden_layers=2)


def test_every_direction_and_what_makes_no_sense(source: Path, tmp_path: Path) -> None:
    hf, t, out = f"hf:{source}", str(tmp_path), f"mcore:{tmp_path}/out"
    good = [[hf, f"mcore:{t}/m", "--tp", "4", "--etp", "1", "--pp", "2", "--ep", "8", "--verify"],
            [f"mcore:{t}/m", f"mcore:{t}/lm", "--format", "megatron-lm", "--tp", "2", "--make-vocab-size-divisible-by", "8"],
            [f"mcore:{t}/lm", f"trtllm-engine:{t}/engine", "--tp", "2", "--moe-ep", "2", "--verify"],
            [f"mcore:{t}/lm", f"hf:{t}/back", "--max-shard-gb", "0.0001", "--verify"],
            [f"hf:{t}/back", f"hf:{t}/one"],
            [f"mcore:{t}/lm", f"hf:{t}/back", "--overwrite", "--dtype", "float32"],
            [hf, f"mcore:{t}/link"]]
    (tmp_path / "link").symlink_to(tmp_path / "real")
    bad: list[tuple[list[str], list[str]]] = [
        ([hf, f"hf:{t}/out", "--tp", "2"], ["--tp says nothing of a destination hf:DIR"]),
        ([hf, out, "--moe-ep", "2"], ["--moe-ep", "trtllm-engine:DIR"]),
        ([hf, f"trtllm-engine:{t}/out", "--format", "mcore-rl"], ["--format"]),
        ([hf, out, "--hf-config", str(source)], ["--hf-config is for a source mcore:DIR"]),
        ([hf, out, "--tp", "0"], ["--tp is 0"]), ([hf, out, "--max-shard-gb", "-1"], ["--max-shard-gb is -1.0"]),
        ([hf, out, "--tp", "3", "--etp", "1"], ["tp=3", "num_attention_heads 4"]), ([hf, out, "--ep", "3"], ["ep=3", "8 experts"]),
        ([hf, out, "--pp", "3"], ["--pp is 3", "2 layers"]), ([hf, f"mcore:{source}"], ["same directory"]),
        ([f"mcore:{t}/m/weights", f"mcore:{t}/m", "--overwrite"], ["one lies in the other"]),
        ([f"mcore:{t}/m", f"hf:{t}/m/hf", "--overwrite"], ["one lies in the other"]),
        ([hf, "mcore:/proc/x"], ["/proc/x", "cannot be written", "another directory"]), ([hf, f"hf:{t}/{'x' * 300}"], ["cannot be written"]),
        ([hf, out, "--max-shard-gb", "nan"], ["--max-shard-gb is nan"]),
        ([f"mcore:{source}", out], ["is no model in Megatron's format"]), ([f"hf:{t}/none", out], ["none", "does not exist"]),
        ([hf, f"trtllm-engine:{t}/out", "--tp", "3"], ["tp", "3"]), ([hf, f"mcore:{t}/m"], ["/m", "--overwrite"]),
    ]
    results = many(*[["convert", *arguments] for arguments in (*good, *(arguments for arguments, _ in bad))])
    for (_, words), result in zip(bad, results[len(good):], strict=True):
        refused(result, *words)
    for code, text, err in results[:len(good)]:
        assert code == 0 and "converted to" in text, err
    assert "and verified" in results[0][1] and "and verified" not in results[1][1]
    want = load_file(source / "model.safetensors")
    have, wide = load_file(tmp_path / "one/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert want.keys() == have.keys() and all(want[k].dtype == have[k].dtype and bool((want[k] == have[k]).all()) for k in want)
    assert all(bool((want[k].float() == wide[k]).all()) and str(wide[k].dtype) == "torch.float32" for k in want)
    assert sorted(p.name for p in (tmp_path / "engine").iterdir()) == ["config.json", "rank0.safetensors", "rank1.safetensors"]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "manifest.json").is_file(), "a link is followed, not replaced"
    assert sorted(os.listdir(tmp_path)) == ["back", "engine", "link", "lm", "m", "one", "real"]


_SLOW = """
import sys, time
from checkpoint.torch_dist_writer import TorchDistWriter
real = TorchDistWriter.write
def write(self, *arguments):
    print("writing", flush=True)
    time.sleep(2)
    real(self, *arguments)
TorchDistWriter.write = write
from mcore_rl.cli import main
main(sys.argv[1:])
"""


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM, in the middle of writing."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = {stop: subprocess.Popen([sys.executable, "-c", _SLOW, "convert", f"hf:{source}", f"mcore:{tmp_path}/{stop.name}"], cwd=ROOT, env=env,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a suite in the background inherits it ignored
               for stop in (signal.SIGINT, signal.SIGTERM)}
    for process in running.values():
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
    assert sorted(os.listdir(tmp_path)) == [".tmp-SIGINT-0", ".tmp-SIGTERM-0"]
    for stop, process in running.items():
        process.send_signal(stop)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert not os.listdir(tmp_path)
