"""vLLM on the same work, in the interpreter that the user names and in the same run of the benchmark, after our own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks._rollout_vllm import RESULT
from benchmarks._rollout_work import Work
from parallel.errors import UserError

SCRIPT = Path(__file__).with_name("_rollout_vllm.py")


def check_rival(name: str | None, python: str | None) -> None:
    """Raise UserError where the rival cannot be run: it is found out before minutes are measured."""
    if name is None and python is None:
        return
    if name is None or python is None:
        raise UserError("bench rollout: --rival vllm and --rival-python FILE belong together; give the Python interpreter that has vLLM")
    try:
        done = subprocess.run([python, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise UserError(f"bench rollout: --rival-python {python!r} cannot be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"bench rollout: `import vllm` in {python!r} does not end within 300 s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"bench rollout: --rival-python {python!r} cannot import vllm ({said}); give an interpreter that has vLLM installed")


def run_vllm(python: str, model: str, dtype: str, threads: int, repeat: int, works: Mapping[str, Work]) -> tuple[str, dict[str, float]]:
    """(vLLM's version, seconds by kind of work). Raises UserError where it fails."""
    first = works["fixed"]
    asked = {"model": str(Path(model).resolve()), "dtype": dtype, "threads": threads, "repeat": repeat,
             "prompts": first.prompts, "samples": first.samples, "lengths": {kind: work.lengths for kind, work in works.items()}}
    process = subprocess.Popen([python, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        result = None
        for line in process.stdout:
            if line.startswith(RESULT):
                result = json.loads(line.removeprefix(RESULT))
            else:
                print(line, end="", flush=True)
    if process.returncode or result is None:
        raise UserError(f"bench rollout: the rival ended with code {process.returncode} and no result; what it said is above")
    return result["version"], result["seconds"]
