"""Every benchmark runs at a tiny size and ends with one JSON object that has the documented keys."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._ceiling import weights_per_token
from benchmarks._generation_limits import kv_bytes, limits
from benchmarks._rollout_work import Work, engine_for, made_up, ragged_by_stop_ids, ragged_lengths
from mcore_rl.commands.bench import execute
from mcore_rl.tokens import character_tokenizer
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
    "rollout": {"tokens", "seconds", "tokens_per_s", "hf_seconds", "hf_tokens_per_s", "times_hf", "prefix_hit_rate", "phases",
                "engine_bytes", "sleep_gives_back", "wake_seconds", "sync_seconds", "first_token_seconds", "wake_sync_first_token_seconds", "ragged_tokens",
                "ragged_seconds", "ragged_tokens_per_s", "ragged_prefix_hit_rate", "ragged_phases", "ragged_of_fixed", "ragged_mean", "ragged_max", "ragged_hf_tokens_per_s", "ragged_times_hf", "gemm_gflops",
                "ceiling_tokens_per_s", "of_ceiling", "rival", "rival_tokens_per_s", "times_rival", "ragged_rival_tokens_per_s", "ragged_times_rival",
                "prompts", "samples", "max_tokens", "prompt_tokens_mean", "max_batch_size", "dtype", "device", "threads"},
    "step": {"rollout_s", "reward_s", "log_probs_s", "advantages_s", "update_s", "sync_s", "other_s", "step_s", "ideal_log_probs_s",
             "ideal_update_s", "update_of_ideal", "gemm_gflops", "tokens_per_step", "tokens_per_s", "sync_bytes", "steps", "ranks",
             "phases", "response_tokens", "dtype", "device"},
    "train": {"bare_overhead", "bare_seconds", "packed_speedup", "packed_seconds", "useful_tokens_per_s", "shared_prompt_speedup",
              "shared_prompt_seconds", "hf_ratio", "hf_ratio_packed", "hf_seconds", "mfu", "gemm_gflops", "repeat", "clock", "dtype", "device", "threads"},
}


TRL = {"rival", "trl_step_s", "trl_response_tokens", "times_trl", "times_trl_per_response_token"}


def bench(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-m", "mcore_rl", "bench", name, *options], capture_output=True, text=True, cwd=ROOT, timeout=300,
                          env={**env, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done


def figures(name: str, *options: str) -> dict[str, float]:
    done = bench(name, *options, "--json")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(found) == KEYS[name] | (TRL if "trl" in options else set())
    documented = (ROOT / "docs" / "performance.md").read_text()
    assert not [key for key in found if f"`{key}`" not in documented]
    assert all(value >= 0 for value in found.values() if isinstance(value, float))
    return found


def test_every_benchmark_is_tested_here() -> None:
    scripts = {"trtllm_smoke"}  # started by itself, and tested in tests/trtllm_rollout/driver/test_smoke.py
    assert set(KEYS) == {p.stem for p in (ROOT / "benchmarks").glob("[!_]*.py")} - scripts
    with pytest.raises(UserError, match="'trtllm_smoke' does not exist; there are: convert, plan, reshard, rollout, step"):
        execute(argparse.Namespace(name="trtllm_smoke", options=[], json=False))


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
    assert done.stdout.count("not run: needs") == 10 and "GRPO step" in done.stdout and "decoding" in done.stdout and "NCCL" in done.stdout and "CUDA IPC" in done.stdout and "device copy" in done.stdout


FAKE_VLLM = """
import json, os
__version__ = "9.9"
class SamplingParams:
    def __init__(self, *, n, temperature, max_tokens, ignore_eos, logprobs, detokenize):
        assert temperature == 1.0 and ignore_eos and logprobs == 0
        self.n, self.max_tokens = n, max_tokens
class Choice:
    def __init__(self, count): self.token_ids = [0] * count
class Output:
    def __init__(self, params): self.outputs = [Choice(params.max_tokens - int(os.environ.get("FAKE_VLLM_LACKS", 0))) for _ in range(params.n)]
class LLM:
    def __init__(self, *, model, dtype, max_model_len, max_num_seqs, seed, disable_log_stats):
        assert os.path.isfile(os.path.join(model, "config.json")) and dtype == "float32"
        print("a line of the rival's own")
    def reset_prefix_cache(self): pass
    def generate(self, prompts, params, use_tqdm):
        with open(os.environ["FAKE_VLLM_LOG"], "a") as log:
            log.write(json.dumps([[p["prompt_token_ids"], s.n, s.max_tokens] for p, s in zip(prompts, params, strict=True)]) + chr(10))
        return [Output(s) for s in params]
"""


def test_rollout_makes_the_tokens_it_counts_and_so_does_its_rival(tmp_path: Path) -> None:
    """Prompts from a file, fixed and ragged lengths, transformers, and vLLM (not the real one) in an interpreter of its own."""
    model = write_model(tmp_path / "model", "llama")
    character_tokenizer("abcdefgh").save_pretrained(model)
    (tmp_path / "prompts.txt").write_text("abc\nfedcba\nnot read\n")
    (tmp_path / "fake" / "vllm").mkdir(parents=True)
    (tmp_path / "fake" / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path}/fake FAKE_VLLM_LOG={tmp_path}/log exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    options = ["--model", str(model), "--prompts", f"{tmp_path}/prompts.txt", "--limit", "2", "--samples", "3", "--max-tokens", "10", "--threads", "1"]
    found = figures("rollout", *options, "--rival", "vllm", "--rival-python", str(python), "--profile")
    assert found["tokens"] == 60 and found["prompts"] == 2 and found["prompt_tokens_mean"] == 4.5 and found["rival"] == "vllm 9.9"
    assert set(found["phases"]) == {"prefill", "decode", "sampling", "other"} and 0 < sum(found["phases"].values()) <= found["seconds"]  # type: ignore[attr-defined]
    assert found["prefix_hit_rate"] == pytest.approx(2 / 3), "each prompt is computed once for its three samples"
    assert found["times_hf"] == pytest.approx(found["hf_seconds"] / found["seconds"])
    assert found["ragged_hf_tokens_per_s"] == pytest.approx(found["ragged_tokens"] / found["hf_seconds"])
    calls = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    prompts = [[4, 5, 6], [9, 8, 7, 6, 5, 4]]
    assert calls[0] == [[ids, 3, 2] for ids in prompts] and calls[1] == [[ids, 3, 10] for ids in prompts]
    assert [c[0] for c in calls[2]] == [ids for ids in prompts for _ in range(3)] and {c[1] for c in calls[2]} == {1}
    assert sum(c[2] for c in calls[2]) == found["ragged_tokens"] == 6 * found["ragged_mean"] and max(c[2] for c in calls[2]) == 10 == found["ragged_max"]
    assert found["ragged_mean"] < 6 and found["ragged_prefix_hit_rate"] == found["prefix_hit_rate"]


def test_rollout_in_two_engines_makes_the_same_work(tmp_path: Path) -> None:
    """Prompts are dealt over the engines, in processes of their own; the rival is measured both ways and its faster one is compared."""
    model = write_model(tmp_path / "model", "llama")
    done = bench("rollout", "--model", str(model), "--prompts", "3", "--samples", "2", "--max-tokens", "10", "--threads", "2", "--engines", "2", "--json")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    extra = {"engines", "hf_one_process_seconds", "hf_apart_seconds"}
    one_process = {"engine_bytes", "sleep_gives_back", "wake_seconds", "sync_seconds", "first_token_seconds", "wake_sync_first_token_seconds"}
    rival = {key for key in KEYS["rollout"] if "rival" in key}
    assert set(found) == (KEYS["rollout"] | extra) - one_process - rival
    assert found["tokens"] == 60 and found["max_batch_size"] == 4 and found["prefix_hit_rate"] == pytest.approx(1 / 2)
    assert found["hf_seconds"] == min(found["hf_one_process_seconds"], found["hf_apart_seconds"])
    documented = (ROOT / "docs" / "performance.md").read_text()
    assert not {key for key in extra if f"`{key}`" not in documented}


def test_ragged_lengths_have_the_mean_and_the_longest_that_are_said() -> None:
    lengths = ragged_lengths(128, 128)
    assert sum(lengths) == 40 * 128 and max(lengths) == 128 and min(lengths) >= 1 and len(set(lengths)) > 50
    assert sorted(lengths)[64] < 32 and lengths == ragged_lengths(128, 128) != ragged_lengths(128, 128, seed=1)
    chance = random.Random(0)
    answers = [[min(999, int(chance.paretovariate(0.7))) for _ in range(128)] for _ in range(64)]  # some ids are frequent, as words are
    fixed = Work(((5, 6), (7,)), 32, (128,) * 64)
    ragged = ragged_by_stop_ids(fixed, answers)
    assert 40 * 64 <= ragged.tokens < 41 * 64 and max(ragged.lengths) == 128 and len(set(ragged.lengths)) > 20
    assert list(ragged.lengths) == [next((k + 1 for k, token in enumerate(ids) if token in ragged.stop_ids), 128) for ids in answers]
    assert [(r.samples, r.sampling.stop_token_ids) for r in ragged.requests()] == [(32, ragged.stop_ids)] * 2


def test_a_rival_that_cannot_be_run_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -S -E \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    for options, words in ((["--rival", "vllm"], "belong together"), (["--rival-python", sys.executable], "belong together"),
                           (["--rival", "vllm", "--rival-python", str(tmp_path / "none")], "cannot be run"),
                           (["--rival", "vllm", "--rival-python", str(tmp_path / "python")], "cannot import vllm .*No module named 'vllm'"),
                           (["--limit", "3"], "--limit and --chat are for prompts from a FILE"), (["--prompts", "0"], "--prompts is 0"),
                           (["--limits", "--max-tokens", "1"], "--max-tokens is 1")):
        with pytest.raises(UserError, match=words):
            execute(argparse.Namespace(name="rollout", options=options, json=False))


def test_decoding_and_prefill_are_measured_beside_their_limits(tmp_path: Path) -> None:
    """In numbers of the model: what a step must read, what a prompt must multiply."""
    model = ModelConfig.from_directory(write_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=1))
    attention, expert, router = 64 * 24 * (4 + 2 * 2 + 4), 3 * 64 * 32, 8 * 64
    assert weights_per_token(model) == attention + router + 3 * expert + 203 * 64
    assert weights_per_token(model, 2) == attention + router + 6 * expert + 203 * 64 and weights_per_token(model, 9) == attention + router + 8 * expert + 203 * 64
    assert weights_per_token(model, head=False) == attention + router + 3 * expert
    assert kv_bytes(model, torch.float32) == 2 * 2 * 24 * 4
    engine = engine_for(model, torch.float32, torch.device("cpu"), 4, 12, made_up)
    found = limits(engine, model, torch.float32, torch.device("cpu"), 4, 4, 8, 1)
    documented = (ROOT / "docs" / "performance.md").read_text()
    assert all(value > 0 and f"`{key}`" in documented for key, value in found.items())
    assert found["decode_tokens_per_s"] == pytest.approx(4 / found["decode_step_seconds"])


@pytest.mark.slow
def test_train_compares_with_every_rival(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "llama", vocab_size=512, max_position_embeddings=512)
    done = bench("train", "--model", str(model), "--repeat", "1", "--sequences", "3", "--micro-batch", "2", "--prompts", "1", "--samples", "3", "--json")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(found) == KEYS["train"] and found["repeat"] == 1 and found["dtype"] == "float32"
    assert found["bare_overhead"] > -1 and all(found[k] > 0 for k in KEYS["train"] - {"bare_overhead", "clock", "dtype", "device"})
    documented = (ROOT / "docs" / "performance.md").read_text()
    assert not [key for key in KEYS["train"] if f"`{key}`" not in documented]


def test_the_bare_loop_of_train_makes_the_same_gradients(tmp_path: Path) -> None:
    """What is compared is the same work: Megatron's own head and loss and ours agree on a padded batch, weights included."""
    from tests.worker_pool import run_ranks

    directory = str(write_model(tmp_path / "m", "llama", initializer_range=0.3, vocab_size=208))  # Megatron trains padding rows too
    for norm, other in run_ranks(1, bare_and_ours, directory):
        assert norm == pytest.approx(other, rel=1e-5)


def bare_and_ours(directory: str) -> tuple[float, float]:
    from benchmarks.train import bare_update
    from parallel.micro_batch import make_micro_batches
    from tests.parallel.test_models import SEQUENCES, open_model

    norms = []
    for _ in range(2):
        training = open_model(directory, {}, True, lr=1e-3, distributed=False)
        batch, = make_micro_batches(SEQUENCES, [range(len(SEQUENCES))], training.parallel, "padded")
        if norms:
            training.forward_backward([batch], lambda batch, log_probs, entropy: (-log_probs.mean(), {}))
            norms.append(training.optimizer_step()[0])
        else:
            step = training.optimizer.step
            training.optimizer.step = lambda: norms.append(float(step()[1]))
            bare_update(training, batch)
    return norms[0], norms[1]


@pytest.mark.slow
def test_step_measures_a_real_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    found = figures("step", str(config), "run.seed=9", "--steps", "2")
    assert found["steps"] == 1 and 0 < found["update_s"] < found["step_s"]
    assert not (tmp_path / "run").exists()
    assert set(found["phases"]) == {"rollout", "reward", "log_probs", "advantages", "update", "sync", "other"}  # type: ignore[call-overload]
    assert sum(found["phases"].values()) == pytest.approx(found["step_s"])  # type: ignore[attr-defined]


FAKE_TRL = '''
import json, os
__version__ = "9.9"
class GRPOConfig(dict):
    def __init__(self, **values): super().__init__(values)
class GRPOTrainer:
    def __init__(self, model, reward_funcs, args, train_dataset, processing_class, callbacks):
        self.__dict__.update(locals())
        assert os.path.isfile(os.path.join(model, "config.json")) and processing_class.padding_side == "left"
    def train(self):
        with open(os.environ["FAKE_TRL_LOG"], "w") as log:
            kept = {k: v for k, v in self.args.items() if k != "output_dir"}
            json.dump([kept, list(self.train_dataset["prompt"])], log)
        for step in range(self.args["max_steps"]):
            for c in self.callbacks: c.on_step_begin(self.args, None, None)
            rewards = self.reward_funcs(completions=["a", "bb"], completion_ids=[[1], [2, 3]], prompts=["p"] * 2)
            assert rewards == [1.0, 0.0]
            for c in self.callbacks: c.on_step_end(self.args, None, None)
'''


def test_step_gives_its_rival_the_same_work(tmp_path: Path) -> None:
    """TRL (not the real one) in an interpreter of its own gets the run's prompts, sizes and type."""
    config = write_run(tmp_path)
    (tmp_path / "fake" / "trl").mkdir(parents=True)
    (tmp_path / "fake" / "trl" / "__init__.py").write_text(FAKE_TRL)
    (tmp_path / "fake" / "datasets.py").write_text("class Dataset:\n    from_dict = staticmethod(dict)\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path}/fake FAKE_TRL_LOG={tmp_path}/log exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    found = figures("step", str(config), "--steps", "2", "--ranks", "1", "--rival", "trl", "--rival-python", str(python), "--rival-steps", "3")
    assert found["rival"] == "trl 9.9" and found["trl_response_tokens"] == 3
    assert found["times_trl"] == pytest.approx(found["trl_step_s"] / found["step_s"])
    assert found["times_trl_per_response_token"] == pytest.approx(found["times_trl"] * found["response_tokens"] / 3)
    asked, prompts = json.loads((tmp_path / "log").read_text())
    assert asked["num_generations"] == 4 and asked["max_completion_length"] == 6 and asked["max_steps"] == 3 and asked["learning_rate"] == 1e-3
    assert asked["per_device_train_batch_size"] * asked["gradient_accumulation_steps"] == 16 and asked["model_init_kwargs"] == {"dtype": "float32"}
    assert asked["use_cpu"] and not asked["bf16"] and asked["beta"] == 0.0
    assert len(prompts) == 8 and len(set(prompts)) == 8 and all(p.endswith("=") for p in prompts)


def test_bad_options_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'reshard'"):
        execute(argparse.Namespace(name="reshrad", options=[], json=False))
    for name, options, words in (
            ("reshard", ["--repeat", "0"], "--repeat 0"), ("reshard", ["--train", "tp4"], "--train tp4 needs 4 ranks, --procs is 2"),
            ("reshard", ["--rollout-ranks", "0,7"], r"engine ranks \[0, 7\] must be different ranks below --procs 2"),
            ("rollout", ["--model", "models/none"], "models/none"), ("rollout", ["--samples", "0"], "--samples is 0"),
            ("rollout", ["--engines", "2", "--limits"], "--engines above 1"),
            ("step", ["--steps", "1"], "--steps 1"), ("step", ["--rival", "trl"], "bench step: --rival trl and --rival-python FILE belong together"),
            ("step", ["--rival", "trl", "--rival-python", "none"], "bench step: --rival-python 'none' cannot be run"),
            ("train", ["--repeat", "0"], "--repeat 0"), ("train", ["--sequences", "1"], "--sequences 1")):
        with pytest.raises(UserError, match=words):
            execute(argparse.Namespace(name=name, options=options, json=False))
