"""The command line as a user meets it: bad input ends with exit code 2 and one readable message; commands do what their help says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import write_model
from tests.runs import read_metrics, write_run

ROOT = Path(__file__).resolve().parents[2]


def mcore_rl(*arguments: str, ranks: int = 1, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    module = ["-m", "mcore_rl"] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "mcore_rl"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.run([sys.executable, *module, *arguments], capture_output=True, text=True, cwd=cwd, timeout=300,
                          env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def config(tmp_path_factory: Any) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


_MANY = """
import contextlib, io, json, sys
from mcore_rl.cli import main
for arguments in json.load(sys.stdin):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def many(*commands: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each command, all in one process: starting one costs seconds."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-c", _MANY], input=json.dumps(commands), capture_output=True, text=True, cwd=ROOT, timeout=300,
                          env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def refused(done: subprocess.CompletedProcess[str] | tuple[int, str, str], *words: str) -> None:
    """Exit code 2, one message with all the words, no traceback."""
    code, out, err = done if isinstance(done, tuple) else (done.returncode, done.stdout, done.stderr)
    assert code == 2, err
    assert "Traceback" not in err + out
    assert err.count("mcore-rl: error:") == 1
    for word in words:
        assert word in err, f"{word!r} is not in: {err}"


def test_bad_keys_are_all_named_with_the_nearest_valid_one(config: Path) -> None:
    bad = config.with_name("bad.yaml")
    bad.write_text(config.read_text() + "evaluation:\n  evry: 3\nrollot:\n  tp: 1\n")
    refused(mcore_rl("train", str(bad), "rollout.temprature=0.5"), "evry", "every", "rollot", "rollout", "temprature", "temperature", "bad.yaml")


def test_bad_values_are_refused(config: Path, tmp_path: Path) -> None:
    twice, mamba = config.with_name("twice.yaml"), tmp_path / "mamba"
    twice.write_text(config.read_text() + "run:\n  steps: 3\n")
    mamba.mkdir()
    (mamba / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    cases: list[tuple[list[str], list[str]]] = [
        (["run.steps=many"], ["run.steps", "many"]),
        (["actor.optimizer.lr=1e"], ["actor.optimizer.lr", "1e"]),
        (["model.path=/no/such/model"], ["/no/such/model", "does not exist"]),
        (["actor.parallel.tp=2"], ["tp=2", "world of 1"]),
        (["data.train=/no/such/file.jsonl"], ["/no/such/file.jsonl"]),
        (["data.max_prompt_tokens=2"], ["max_prompt_tokens"]),
        (["rollout.max_tokens=40"], ["rollout.max_tokens 40", "32"]),
        (["reward.function=tests.runs:nothing"], ["tests.runs:nothing"]),
        ([f"model.path={mamba}"], ["mamba", "llama", "qwen2"]),
    ]
    results = many(["train", str(twice)], *[["train", str(config), *overrides] for overrides, _ in cases])
    refused(results[0], "run", "twice.yaml")
    for (_, words), result in zip(cases, results[1:], strict=True):
        refused(result, *words)


def test_what_is_not_a_model_is_never_overwritten(config: Path, tmp_path: Path) -> None:
    precious, prompts = tmp_path / "precious", tmp_path / "prompts.jsonl"
    precious.mkdir()
    (precious / "notes.txt").write_text("mine")
    prompts.write_text('{"prompt": "1+2="}\n')
    model = str(config.parent / "model")
    sft = ["sft", str(ROOT / "configs/demo_warm_up.yaml"), f"run.dir={tmp_path}/run", f"model.path={model}"]
    results = many([*sft, f"sft.output={precious}"], [*sft, f"sft.output={prompts}"],
                   ["convert", f"hf:{model}", f"hf:{precious}", "--overwrite"],
                   ["generate", model, "--prompts", str(prompts), "--tp", "0"],
                   ["generate", model, "--prompts", str(prompts), "--out", str(precious)],
                   ["train", str(config), f"run.dir={prompts}"])
    for result, word in zip(results, ["notes.txt", "is a file", "notes.txt", "--tp is 0", "--out", "run.dir"], strict=True):
        refused(result, word)
    assert (precious / "notes.txt").read_text() == "mine"


def test_tp_that_does_not_divide_heads_is_refused_under_torchrun(config: Path) -> None:
    done = mcore_rl("train", str(config), "actor.parallel.tp=3", ranks=3)
    assert done.returncode != 0 and done.stderr.count("mcore-rl: error:") == 1
    assert "num_attention_heads 4" in done.stderr and "tp may be" in done.stderr


def test_a_learning_rate_that_yaml_reads_as_text_is_a_number(config: Path) -> None:
    good = config.with_name("lr.yaml")
    good.write_text(config.read_text().replace("lr: 0.001", "lr: 1e-6"))
    assert "1e-6" in good.read_text()
    from mcore_rl.config import load_config

    assert load_config(good, [], "train").actor.optimizer.lr == 1e-6


def test_every_command_shows_an_example() -> None:
    commands = ("train", "sft", "evaluate", "convert", "generate", "serve", "bench", "fetch")
    for command, (code, out, _) in zip(commands, many(*[[c, "--help"] for c in commands]), strict=True):
        assert code == 0 and "example:" in out and "mcore" in out.split("example:")[1], command


def test_convert_there_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = write_model(tmp_path / "hf", "qwen2", tie_word_embeddings=False, dtype="bfloat16")
    sizes = (["--tp", "1"], ["--tp", "2", "--pp", "2"])
    *done, existing, unnamed = many(*[["convert", f"hf:{source}", f"mcore:{tmp_path}/m{i}", *s] for i, s in enumerate(sizes)],
                                    *[["convert", f"mcore:{tmp_path}/m{i}", f"hf:{tmp_path}/back{i}"] for i in range(2)],
                                    ["convert", f"hf:{source}", f"mcore:{tmp_path}/m0"], ["convert", str(source), f"mcore:{tmp_path}/m3"])
    assert [code for code, _, _ in done] == [0] * 4, done
    for i in range(2):
        want, got = load_file(source / "model.safetensors"), load_file(tmp_path / f"back{i}" / "model.safetensors")
        assert want.keys() == got.keys()
        assert all(want[k].dtype == got[k].dtype and torch.equal(want[k].view(torch.int16), got[k].view(torch.int16)) for k in want)
    refused(existing, "m0")
    refused(unnamed, "hf:DIR")


def test_generate_writes_one_object_per_sample(config: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "12+34="}\n{"prompt": "7+1="}\n')
    model = config.parent / "model"
    outputs = {}
    for tp in ("1", "2"):
        out = tmp_path / f"out{tp}.jsonl"
        done = mcore_rl("generate", str(model), "--prompts", str(prompts), "--samples", "2", "--max-tokens", "4", "--temperature", "0.8",
                        "--tp", tp, "--out", str(out))
        assert done.returncode == 0, done.stderr
        outputs[tp] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [o["token_ids"] for o in outputs["1"]] == [o["token_ids"] for o in outputs["2"]]
    assert [o["prompt"] for o in outputs["1"]] == ["12+34="] * 2 + ["7+1="] * 2
    assert all(len(o["log_probs"]) == len(o["token_ids"]) <= 4 and o["finish_reason"] in ("stop", "length") for o in outputs["1"])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    refused(mcore_rl("generate", str(model), "--prompts", str(empty)), "empty.jsonl")


def test_train_leaves_what_the_documentation_says(config: Path, tmp_path: Path) -> None:
    from mcore_rl.outputs import METRIC_KEYS

    run = tmp_path / "run"
    done = mcore_rl("train", str(config), f"run.dir={run}", "run.steps=2", "checkpoint.every=2", "evaluation.data=builtin:addition-held-out",
                    "evaluation.every=1", "evaluation.max_prompts=5", "evaluation.samples=2", "log.plots=true", "log.tensorboard=true", "log.level=debug")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(run)
    assert [r["step"] for r in rows] == [1, 2]
    for row in rows:
        assert not [k for k in METRIC_KEYS if k not in row]
        assert row["actor/ratio_max_deviation"] < 1e-4 and row["actor/log_prob_gap_max"] < 1e-3
    assert {"eval/greedy", "eval/avg@2", "eval/pass@2"} <= rows[-1].keys() and rows[-1]["eval/weights_version"] == 2
    assert rows[0]["eval/weights_version"] == 0 and rows[-1]["eval_before/weights_version"] == 1  # of the last step's start
    sample = json.loads((run / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    assert {"prompt", "response", "tokens", "mask", "reward", "version"} <= sample.keys()
    for name in ("config.yaml", "metrics.jsonl", "plots/reward.png", "checkpoints/latest", "tensorboard"):
        assert (run / name).exists(), name
    assert "old_log_probs" in done.stderr and "To continue:" in done.stdout
    again = mcore_rl("train", str(run / "config.yaml"), "run.steps=3")  # the resolved file is a configuration
    assert again.returncode == 0, again.stderr
    assert [r["step"] for r in read_metrics(run)] == [1, 2, 3] and "resumed from" in again.stdout
    # the trained policy comes out as a Hugging Face directory
    ((code, _, err),) = many(["convert", f"mcore:{run}/checkpoints/step_000003", f"hf:{tmp_path}/trained"])
    assert code == 0, err
    from safetensors.torch import load_file

    before, after = load_file(config.parent / "model" / "model.safetensors"), load_file(tmp_path / "trained" / "model.safetensors")
    assert before.keys() == after.keys() and (tmp_path / "trained" / "tokenizer.json").is_file()
    changed = (before["model.norm.weight"] - after["model.norm.weight"]).abs().max()
    assert 1e-5 < changed < 1e-2
