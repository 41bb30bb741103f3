"""`mcore-rl generate` and `mcore-rl serve` as a user meets them: every kind of model, every option, a server's life from start to signal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.server.worker import EngineWorker, follow
from tests.e2e.processes import ROOT
from tests.e2e.test_command_line import many, refused
from tests.models import reference_logits
from tests.runs import write_run
from tests.trtllm_rollout.engines import make_engine
from tests.worker_pool import run_ranks
from trtllm_rollout.protocol import Request, SamplingParams

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}="


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    directory = write_run(tmp_path_factory.mktemp("run")).parent / "model"
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return directory


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_weights_that_give_no_numbers_end_generate_with_one_line(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] * float("nan")}, tmp_path / "broken" / "model.safetensors",
              {"format": "pt"})
    (tmp_path / "prompts.txt").write_text("1+1=")
    [(code, _, said)] = many(["generate", f"{tmp_path}/broken", "--prompts", f"{tmp_path}/prompts.txt", "--max-tokens", "6"])
    assert code == 1 and "Traceback" not in said and "logits of weights version 0 are not finite" in said.splitlines()[-1]


def test_generate_takes_every_kind_of_model_and_reports_what_is_asked_for(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "12+34="}\n{"prompt": [{"role": "user", "content": "7+1"}]}\n{"prompt": "never read"}')
    options = ["--prompts", str(prompts), "--limit", "2", "--samples", "2", "--max-tokens", "6", "--min-tokens", "3", "--temperature", "0.7", "--seed", "3",
               "--log-probs", "3", "--prompt-log-probs", "--stop", "9", "--stop", "11"]
    t = str(tmp_path)
    serve = [([str(model), "--host", "0.0.0.0"], "an API key is required"), ([str(model), "--port", "70000"], "--port is 70000"),
             ([str(model), "--tp", "0"], "--tp is 0"), ([str(model), "--kv-cache-gb", "0"], "--kv-cache-gb"), ([f"{t}/none"], "none"),
             ([str(model), "--hf-config", str(model)], "--hf-config is for"), ([str(model), "--max-seq-len", "99"], "max_seq_len is 99")]
    *done, hf, ours, lm, plain, kept, odd, unfit, above = many(
        *(["serve", *arguments] for arguments, _ in serve),
        ["convert", f"hf:{model}", f"mcore:{t}/ours", "--tp", "2"], ["convert", f"hf:{model}", f"mcore:{t}/lm", "--format", "megatron-lm"],
        *(["generate", name, *options, "--out", f"{t}/{out}.jsonl"] for name, out in ((str(model), "hf"), (f"mcore:{t}/ours", "ours"), (f"mcore:{t}/lm", "lm"))),
        ["generate", str(model), "--prompts", str(prompts), "--limit", "1", "--max-tokens", "8", "--min-tokens", "8", "--min-p", "1",
         "--repetition-penalty", "2", "--presence-penalty", "1"],
        ["generate", str(model), "--prompts", str(prompts), "--limit", "1", "--max-tokens", "8", "--min-tokens", "8", "--temperature", "0"],
        ["generate", str(model), "--prompts", str(prompts), "--system", "x"],
        ["generate", str(model), "--prompts", str(prompts), "--log-probs", "-1"],
        ["generate", str(model), "--prompts", str(prompts), "--max-tokens", "2", "--min-tokens", "3"])
    for (_, word), result in zip(serve, done, strict=False):
        refused(result, word)
    made = done[len(serve):]
    assert [code for code, *_ in (*made, hf, ours, lm, plain, kept)] == [0] * 7, (hf, ours, lm, plain, kept)
    lines = read(tmp_path / "hf.jsonl")
    assert "4 responses to 2 prompts" in hf[2] and len(lines) == 4
    for other in ("ours", "lm"):
        assert read(tmp_path / f"{other}.jsonl") == lines
    for line in lines:
        ids, prompt = line["token_ids"], line["prompt_token_ids"]
        logits = reference_logits(model, [prompt + ids])[0].double()
        raw, cold = logits.log_softmax(-1), (logits / 0.7).log_softmax(-1)
        at = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
        assert line["raw_log_probs"] == pytest.approx([float(raw[i, token]) for i, token in zip(at, ids)], abs=1e-4)
        assert line["log_probs"] == pytest.approx([float(cold[i, token]) for i, token in zip(at, ids)], abs=1e-4)
        assert line["prompt_log_probs"] == pytest.approx([float(raw[i, token]) for i, token in enumerate(prompt[1:])], abs=1e-4)
        assert [[i for i, _ in top] for top in line["top_log_probs"]] == raw[list(at)].topk(3).indices.tolist()
        assert 3 <= len(ids) <= 6 and (line["stop_reason"] in ("9", "11", 2)) == (line["finish_reason"] == "stop")
    assert lines[2]["prompt"] == [{"role": "user", "content": "7+1"}] and lines[2]["prompt_token_ids"][0] == 1, "one BOS, from the template"
    penalised, greedy = json.loads(plain[1]), json.loads(kept[1])
    assert set(greedy) == {"prompt", "response", "token_ids", "log_probs", "finish_reason", "stop_reason"}
    assert penalised["token_ids"] == by_hand(model, lines[0]["prompt_token_ids"], 8)
    assert penalised["token_ids"] != greedy["token_ids"], "min-p 1 leaves the likeliest token, after penalties"
    refused(odd, "--system", "--chat")
    refused(unfit, "--log-probs is -1")
    refused(above, "min_tokens is 3")


def by_hand(model: Path, prompt: list[int], count: int) -> list[int]:
    """The likeliest token each time, after repetition penalty 2 (prompt and answer) and presence penalty 1 (answer)."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        logits = reference_logits(model, [ids])[0, -1].double()
        seen = torch.tensor(sorted(set(ids)))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 2, logits[seen] * 2)
        logits[torch.tensor(sorted(set(ids[len(prompt):])), dtype=torch.int64)] -= 1
        logits[2] = -torch.inf  # no end before min_tokens
        ids.append(int(logits.argmax()))
    return ids[len(prompt):]


def test_a_server_lives_until_a_signal(model: Path, tmp_path: Path) -> None:
    """It says where it is, answers as `generate` does, ends a running answer's work first, and exits with 0."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    process = subprocess.Popen([sys.executable, "-m", "mcore_rl", "serve", str(model), "--port", "0", "--name", "tiny"], cwd=ROOT, text=True,
                               env={**env, "OMP_NUM_THREADS": "1", "MCORE_RL_API_KEY": "k"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:4] == ["tiny", "is", "served", "at"], words
        client = openai.OpenAI(base_url=words[4], api_key="k", max_retries=0, timeout=60)
        done = client.completions.create(model="tiny", prompt="12+34=", max_tokens=8, temperature=0, logprobs=0, extra_body={"return_token_ids": True})
        chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "7+1"}], max_tokens=8, temperature=0,
                                              extra_body={"return_token_ids": True})
        for choice in (done.choices[0], chat.choices[0]):
            logits = reference_logits(model, [choice.prompt_token_ids + choice.token_ids])[0]
            assert logits[len(choice.prompt_token_ids) - 1:-1].argmax(-1).tolist() == choice.token_ids, "greedy"
        assert chat.choices[0].prompt_token_ids[0] == 1 != chat.choices[0].prompt_token_ids[1]
        with pytest.raises(openai.BadRequestError, match="at most"):
            client.completions.create(model="tiny", prompt="12+34=", max_tokens=500)
        stream = client.completions.create(model="tiny", prompt="12+34=", max_tokens=20, stream=True, extra_body={"ignore_eos": True})
        pieces = [next(iter(stream))]
        process.send_signal(signal.SIGTERM)
        pieces += list(stream)
        assert pieces[-1].choices[0].finish_reason == "length", "a running answer is finished"
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.communicate()


def serve_two_ranks(directory: str) -> list[tuple[int, ...]] | None:
    """On both ranks of an engine: the first has callers, the other follows."""
    import torch.distributed as dist

    engine = make_engine(directory, tp=2)
    if dist.get_rank():
        follow(engine, dist.group.WORLD)
        return None
    worker = EngineWorker(engine, dist.group.WORLD)
    worker.start()
    asked = [Request(i, (1, 5 + i, 9), SamplingParams(max_tokens=5), 2, (i,)) for i in range(3)]
    done = [worker.generate([request])[k].token_ids for request in asked for k in range(2)]
    together = [c.token_ids for c in worker.generate(asked)]
    worker.stop()
    assert together == done
    return done


def test_other_ranks_of_an_engine_follow_the_first(model: Path) -> None:
    got = run_ranks(2, serve_two_ranks, str(model))[0]
    alone = make_engine(str(model))
    want = [c.token_ids for c in alone.generate([Request(i, (1, 5 + i, 9), SamplingParams(max_tokens=5), 2, (i,)) for i in range(3)])]
    assert got == want
