"""Every benchmark runs at a tiny size and ends with one JSON object that has the documented keys."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.commands.bench import execute
from parallel.errors import UserError
from parallel.model import torch_dtype
from parallel.model_config import ModelConfig
from resharding.layouts import trtllm_layout
from tests.models import write_model
from tests.runs import write_run

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "reshard": {"bytes_needed", "bytes_moved", "bytes_between_ranks", "seconds", "seconds_without_checksums", "checksum_seconds", "plan_seconds",
                "gb_per_s", "gb_per_s_without_checksums", "copy_gb_per_s", "of_copy", "of_copy_without_checksums", "transport",
                "transport_gb_per_s", "of_transport_without_checksums", "peak_extra_bytes", "bucket_bytes", "gather_seconds",
                "gather_fairness", "all_gather_gb_per_s", "times_faster_than_gather", "times_faster_than_gather_without_checksums",
                "train", "rollout", "procs", "dtype", "device"},
    "convert": {"bytes", "seconds", "gb_per_s", "plain_copy_gb_per_s", "of_plain_copy", "plain_copy_seconds", "peak_rss_growth_bytes"},
    "plan": {"rank", "seconds", "copies", "peak_rss_bytes"},  # of one rank
    "rollout": {"tokens", "engine_seconds", "engine_tokens_per_s", "transformers_seconds", "transformers_tokens_per_s", "gemm_gflops",
                "ceiling_tokens_per_s", "engine_of_ceiling", "dtype", "device", "threads"},
    "step": {"rollout_s", "reward_s", "log_probs_s", "advantages_s", "update_s", "sync_s", "other_s", "step_s", "ideal_log_probs_s",
             "ideal_update_s", "update_of_ideal", "gemm_gflops", "tokens_per_step", "tokens_per_s", "sync_bytes", "steps", "ranks",
             "dtype", "device"},
}


def bench(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-m", "mcore_rl", "bench", name, *options], capture_output=True, text=True, cwd=ROOT, timeout=300,
                          env={**env, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done


def figures(name: str, *options: str) -> dict[str, float]:
    done = bench(name, *options, "--json")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(found) == KEYS[name]
    documented = (ROOT / "docs" / "performance.md").read_text()
    assert not [key for key in KEYS[name] if f"`{key}`" not in documented]
    assert all(value >= 0 for value in found.values() if isinstance(value, float))
    return found


def test_every_benchmark_is_tested_here() -> None:
    assert set(KEYS) == {p.stem for p in (ROOT / "benchmarks").glob("[!_]*.py")}


def test_reshard_moves_what_the_engine_needs_and_agrees_with_its_rival(tmp_path: Path) -> None:
    """Two stages to TP2: half of the bytes come from the other rank, and the vocabulary is padded."""
    model = write_model(tmp_path / "model", "qwen2", vocab_size=201)
    found = figures("reshard", "--model", str(model), "--train", "pp2", "--rollout", "tp2", "--procs", "2", "--repeat", "1")
    layouts = [trtllm_layout(ModelConfig.from_directory(model), 2, r, r, torch_dtype("bfloat16")) for r in range(2)]
    padding = 2 * 64 * 2  # a row of the embedding and one of the head
    assert found["bytes_moved"] == found["bytes_needed"] == sum(layout.nbytes for layout in layouts) - padding
    assert 0 < found["bytes_between_ranks"] < found["bytes_moved"] and found["transport"] == "in_place + shared_memory"
    assert 0 <= found["peak_extra_bytes"] <= 2 * found["bucket_bytes"]


def test_convert_measures_one_direction_beside_a_plain_copy(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe")
    found = figures("convert", "--model", str(model), "--direction", "hf-to-mcore", "--repeat", "1")
    assert found["bytes"] > 0 and found["of_plain_copy"] > 0


def test_plan_measures_a_rank_of_a_thousand() -> None:
    """Rank 960 holds the last stage and no engine: it sends all that it has, 32 times over, and receives nothing."""
    found = figures("plan", "--case", "deepseek-v3", "--rank", "960")
    assert found["copies"] > 2 * 4 * 3 * 32 and found["peak_rss_bytes"] < 1e9


def test_the_gpu_session_says_what_this_machine_lacks() -> None:
    done = subprocess.run(["benchmarks/gpu_session.sh", sys.executable], capture_output=True, text=True, cwd=ROOT, timeout=120,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not run: needs") == 6 and "NCCL" in done.stdout and "CUDA IPC" in done.stdout and "device copy" in done.stdout


@pytest.mark.slow
def test_rollout_makes_the_tokens_it_counts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    found = figures("rollout", "--model", str(model), "--prompts", "2", "--samples", "2", "--prompt-tokens", "4", "--max-tokens", "3", "--repeat", "1")
    assert found["tokens"] == 12


@pytest.mark.slow
def test_step_measures_a_real_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    found = figures("step", str(config), "run.seed=9", "--steps", "2")
    assert found["steps"] == 1 and 0 < found["update_s"] < found["step_s"]
    assert not (tmp_path / "run").exists()


def test_bad_options_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'reshard'"):
        execute(argparse.Namespace(name="reshrad", options=[], json=False))
    for name, options, words in (
            ("reshard", ["--repeat", "0"], "--repeat 0"), ("reshard", ["--train", "tp4"], "--train tp4 needs 4 ranks, --procs is 2"),
            ("reshard", ["--rollout-ranks", "0,7"], r"engine ranks \[0, 7\] must be different ranks below --procs 2"),
            ("rollout", ["--model", "models/none"], "models/none"), ("rollout", ["--samples", "0"], "--samples is 0"),
            ("step", ["--steps", "1"], "--steps 1")):
        with pytest.raises(UserError, match=words):
            execute(argparse.Namespace(name=name, options=options, json=False))
