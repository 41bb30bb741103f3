"""What a run writes while it runs, on rank 0: metrics.jsonl, TensorBoard events, Weights & Biases, samples/.

Both writers can go back to a step, so after a resume each step is there once.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parallel.errors import UserError

logger = logging.getLogger(__name__)

SAMPLE_KEYS = ("prompt", "response", "tokens", "mask", "reward", "version")
METRIC_KEYS = (
    "step", "reward/mean", "reward/std", "response/length_mean", "response/truncated_fraction", "actor/loss", "actor/grad_norm",
    "actor/kl_to_old", "actor/ratio_max_deviation", "actor/log_prob_gap_max", "actor/entropy", "sync/bytes", "sync/seconds",
    "weights/version", "rollout/tokens_per_second", "time/rollout_s", "time/reward_s", "time/log_probs_s", "time/update_s",
    "time/sync_s", "time/checkpoint_s", "time/evaluation_s", "time/step_s",
)


def _plain(value: Any) -> Any:
    """Tensors and arrays as numbers or lists; what is not finite as null, for JSON has no word for it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _replace(path: Path, text: str) -> None:
    """Write `text` to `path`, all or nothing."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl; a last line that a kill cut short is left out. Raises UserError for other damage."""
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):  # it ends in a line break, so it was written whole
                raise UserError(f"{path}:{number} is not JSON; remove the line, or start in a new run.dir") from None
    return rows


class MetricsWriter:
    """Appends one object per step to run_dir/metrics.jsonl, and the same numbers to TensorBoard and W&B where asked for.

    On a resume call `truncate_after(step)` before the first `write`. Raises UserError where W&B is asked for but missing.
    """

    def __init__(self, run_dir: str | Path, tensorboard: bool = True, wandb: bool = False, config: dict[str, Any] | None = None) -> None:
        self.run_dir = Path(run_dir)
        self._wandb_module = _import_wandb() if wandb else None
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.path = self.run_dir / "metrics.jsonl"
        self._tensorboard, self._config = tensorboard, config
        self._events: Any = None
        self._wandb: Any = None
        rows = read_metrics(self.run_dir)
        self._last = int(rows[-1]["step"]) if rows else None
        if self.path.exists():
            self._rewrite(rows)

    def truncate_after(self, step: int) -> None:
        """Forget everything after `step` (and a torn last line), in one atomic replacement of the file."""
        rows = [row for row in read_metrics(self.run_dir) if row["step"] <= step]
        self._rewrite(rows)
        self._last = step if not rows else int(rows[-1]["step"])
        self._close_events()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the object of `step`. Raises ValueError where that step, or a later one, is already there."""
        if self._last is not None and step <= self._last:
            raise ValueError(f"metrics of step {step} after those of step {self._last}: each step is written once; truncate_after first")
        row = {"step": step, **{key: _plain(value) for key, value in metrics.items() if key != "step"}}
        if missing := [key for key, value in row.items() if value is None and metrics.get(key) is not None]:
            logger.warning("step %d: not finite, written as null: %s", step, ", ".join(missing))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._send(step, {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float))})
        self._last = step

    def close(self) -> None:
        self._close_events()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        _replace(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def _close_events(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        if self._tensorboard:
            if self._events is None:
                from torch.utils.tensorboard import SummaryWriter

                # purge_step hides what an earlier start wrote from this step on
                self._events = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=step)
            for key, value in numbers.items():
                self._events.add_scalar(key, value, step)
            self._events.flush()
        if self._wandb_module is not None:
            if self._wandb is None:
                self._wandb = _start_wandb(self._wandb_module, self.run_dir, self._config)
            self._wandb.log(numbers, step=step)


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise UserError("log.wandb is true, but the package wandb is not installed; run `pip install wandb`, or set "
                        "log.wandb: false") from None


def _start_wandb(wandb: Any, run_dir: Path, config: dict[str, Any] | None) -> Any:
    """A W&B run whose id is kept in the run directory, so that a resumed run continues it."""
    id_file = run_dir / "wandb_id"
    known = id_file.read_text().strip() if id_file.exists() else None
    run = wandb.init(project="mcore-rl", name=run_dir.name, dir=str(run_dir), id=known, resume="allow", config=config)
    id_file.write_text(run.id)
    return run


class SamplesWriter:
    """Writes run_dir/samples/step_000001.jsonl: the first `per_step` samples of a step (None: all; 0: no files)."""

    def __init__(self, run_dir: str | Path, per_step: int | None = 32) -> None:
        self.directory, self.per_step = Path(run_dir) / "samples", per_step

    def write(self, step: int, samples: Iterable[Mapping[str, Any]]) -> Path | None:
        """One line per sample, with at least SAMPLE_KEYS; the file appears whole. Raises ValueError where a key is missing."""
        if self.per_step == 0:
            return None
        lines = []
        for number, sample in enumerate(samples):
            if self.per_step is not None and number >= self.per_step:
                break
            if missing := [key for key in SAMPLE_KEYS if key not in sample]:
                raise ValueError(f"sample {number} of step {step} lacks {', '.join(missing)}")
            lines.append(json.dumps(_plain(sample), ensure_ascii=False) + "\n")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step_{step:06d}.jsonl"
        _replace(path, "".join(lines))
        return path

    def truncate_after(self, step: int) -> None:
        """Remove the files of later steps."""
        for path in self.directory.glob("step_*.jsonl"):
            found = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
            if found and int(found[1]) > step:
                path.unlink()
