"""Evaluation on held-out prompts: greedy pass rate, avg@k and pass@k, as `eval/*`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcore_rl.phases import phase
from mcore_rl.run import Run
from mcore_rl.sample import Batch
from trtllm_rollout.protocol import Completion, Request

PASS = 0.5  # a response passes when its reward is at least this
_STREAM = 1 << 32  # keeps the random streams of evaluation apart from those of training


@phase("time/evaluation_s", reads=("rows",))
def evaluate(run: Run, batch: Batch) -> None:
    """Measure the current weights on the held-out prompts."""
    results = measure(run)
    answers = results.pop("answers")
    if "eval/weights_version" in batch.metrics:  # the last step holds two evaluations: that of the weights it started from moves aside
        for key in [k for k in batch.metrics if k.startswith("eval/")]:
            batch.metrics[key.replace("eval/", "eval_before/", 1)] = batch.metrics.pop(key)
    batch.metrics.update({f"eval/{k}": v for k, v in results.items()})
    if run.rank == 0:
        write_answers(run.directory, int(results["weights_version"]), answers)


def write_answers(run_dir: Path, version: int, answers: list[dict[str, Any]]) -> None:
    """run_dir/evaluations/version_000000.jsonl: a response to every held-out prompt."""
    path = run_dir / "evaluations" / f"version_{version:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(a) + "\n" for a in answers))


def forget_answers(run_dir: Path, version: int) -> None:
    """Remove the answers of later weights, after going back to `version`."""
    for path in (run_dir / "evaluations").glob("version_*.jsonl"):
        if int(path.stem.removeprefix("version_")) > version:
            path.unlink()


def read_answers(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The answers of the first and of the last evaluation of a run; empty lists where there are not two."""
    files = sorted((run_dir / "evaluations").glob("version_*.jsonl"))
    if len(files) < 2:
        return [], []
    first, last = ([json.loads(line) for line in f.read_text().splitlines()] for f in (files[0], files[-1]))
    return (first, last) if [a["prompt"] for a in first] == [a["prompt"] for a in last] else ([], [])


def measure(run: Run) -> dict[str, Any]:
    """Pass rates of the engines' current weights on the held-out prompts.

    Keys: `greedy` (share of prompts whose greedy response passes), `avg@k` and `pass@k` of k samples, `prompts`,
    `response_length_mean`, `weights_version`, and `answers`: one response to every prompt.
    """
    c = run.config.evaluation
    out: dict[str, Any] = {"prompts": float(len(run.held_out)), "weights_version": float(run.rollout.engine.version or 0)}
    answers: list[dict[str, Any]] = []
    lengths: list[int] = []
    if c.greedy:
        done = _generate(run, 0.0, 1)
        rewards = _rewards(run, done)
        passed = [r >= PASS for r in rewards]
        out["greedy"] = sum(passed) / len(passed)
        answers = _answers(run, done, rewards)
        lengths += [len(d.token_ids) for d in done]
    if c.samples:
        done = _generate(run, c.temperature, c.samples)
        rewards = _rewards(run, done)
        passed = [r >= PASS for r in rewards]
        out[f"avg@{c.samples}"] = sum(passed) / len(passed)
        groups = [passed[i:i + c.samples] for i in range(0, len(passed), c.samples)]
        out[f"pass@{c.samples}"] = sum(map(any, groups)) / len(groups)
        answers = answers or _answers(run, done[::c.samples], rewards[::c.samples])
        lengths += [len(d.token_ids) for d in done]
    out["response_length_mean"] = sum(lengths) / max(len(lengths), 1)
    out["answers"] = answers
    return out


def _generate(run: Run, temperature: float, samples: int) -> list[Completion]:
    sampling = run.sampling(temperature)
    version = run.rollout.engine.version or 0
    return run.rollout.generate([
        Request(i, row.prompt_ids, sampling, samples, (run.config.run.seed, _STREAM + version, i)) for i, row in enumerate(run.held_out)])


def _rewards(run: Run, done: list[Completion]) -> list[float]:
    return run.exchange.share(len(done), lambda i: run.reward(_text(run, done[i]), run.held_out[done[i].request_id]), "evaluation rewards")


def _answers(run: Run, done: list[Completion], rewards: list[float]) -> list[dict[str, Any]]:
    rows = [run.held_out[d.request_id] for d in done]
    return [{"prompt": row.prompt_text, "answer": row.answer, "response": _text(run, d), "reward": reward}
            for row, d, reward in zip(rows, done, rewards, strict=True)]


def _text(run: Run, done: Completion) -> str:
    return run.tokenizer.decode(done.token_ids, skip_special_tokens=True)
