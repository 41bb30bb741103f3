"""Another program on the same work, in the interpreter that the user names and in the same run of the benchmark, after our own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._rollout_vllm import RESULT
from benchmarks._rollout_work import Work
from benchmarks._step_trl import RESULT as STEP_RESULT
from parallel.errors import UserError


def check_rival(name: str | None, python: str | None, bench: str = "rollout", package: str = "vllm") -> None:
    """Raise UserError where the rival cannot be run: it is found out before minutes are measured."""
    if name is None and python is None:
        return
    if name is None or python is None:
        raise UserError(f"bench {bench}: --rival {package} and --rival-python FILE belong together; give the Python interpreter that has {package}")
    try:
        done = subprocess.run([python, "-c", f"import {package}; print({package}.__version__)"], capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise UserError(f"bench {bench}: --rival-python {python!r} cannot be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"bench {bench}: `import {package}` in {python!r} does not end within 300 s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"bench {bench}: --rival-python {python!r} cannot import {package} ({said}); give an interpreter that has {package} installed")


def run_vllm(python: str, model: str, dtype: str, threads: int, repeat: int, works: Mapping[str, Work]) -> tuple[str, dict[str, float]]:
    """(vLLM's version, seconds by kind of work). Raises UserError where it fails."""
    first = works["fixed"]
    asked = {"model": str(Path(model).resolve()), "dtype": dtype, "threads": threads, "repeat": repeat,
             "prompts": first.prompts, "samples": first.samples, "lengths": {kind: work.lengths for kind, work in works.items()}}
    result = _ask(python, "_rollout_vllm.py", RESULT, asked, "rollout")
    return result["version"], result["seconds"]


def run_trl(python: str, asked: dict[str, Any]) -> dict[str, Any]:
    """TRL's GRPOTrainer on the same prompts: `version`, `seconds` and `tokens` (of the responses) of each step. Raises UserError where it fails."""
    return _ask(python, "_step_trl.py", STEP_RESULT, asked, "step")


def _ask(python: str, script: str, mark: str, asked: dict[str, Any], bench: str) -> dict[str, Any]:
    threads = str(asked["threads"])
    process = subprocess.Popen([python, str(Path(__file__).with_name(script))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": threads})
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        result = None
        for line in process.stdout:
            if line.startswith(mark):
                result = json.loads(line.removeprefix(mark))
            else:
                print(line, end="", flush=True)
    if process.returncode or result is None:
        raise UserError(f"bench {bench}: the rival ended with code {process.returncode} and no result; what it said is above")
    return result
