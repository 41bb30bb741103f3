"""What a person sees while a run goes on, and the summary at its end (rank 0)."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mcore_rl.outputs import read_metrics

_BARS = "▁▂▃▄▅▆▇█"
_PHASES = ("rollout", "reward", "log_probs", "values", "critic_update", "update", "sync", "checkpoint", "evaluation")


class Progress:
    """Step, reward, tokens/s and time by phase: redrawn in place on a terminal, one plain line per step elsewhere.

        with Progress(steps=60, title="train") as progress:
            progress.phase("rollout")           # what is being done now
            progress.step(1, metrics)           # a finished step, with its metrics.jsonl keys
            progress.note("checkpoint 10 written")
    """

    def __init__(self, steps: int, title: str = "train", console: Console | None = None, done: int = 0) -> None:
        self.console = console or Console(highlight=False)
        self.steps, self.title, self.done = steps, title, done
        self._rewards: list[float] = []
        self._metrics: Mapping[str, Any] = {}
        self._phase, self._started, self._first = "starting", time.monotonic(), done
        self._live = Live(self._render(), console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str) -> None:
        """What the run does now."""
        self._phase = name
        self._draw()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A finished step."""
        self.done, self._metrics = step, metrics
        if isinstance(metrics.get("reward/mean"), (int, float)):
            self._rewards.append(float(metrics["reward/mean"]))
        if self._live:
            self._draw()
        elif step % max(1, self.steps // 100) == 0 or step in (1, self.steps):  # a long run says something about a hundred times
            self.note(step_line(step, self.steps, metrics, self.title))

    def _draw(self) -> None:
        if self._live:
            self._live.update(self._render())

    def _render(self) -> Group:
        left = ""
        if self.done > self._first:
            seconds = (time.monotonic() - self._started) / (self.done - self._first) * (self.steps - self.done)
            left = f"  about {duration(seconds)} left"
        head = Text.assemble((f"{self.title} ", "bold"), f"step {self.done}/{self.steps}  ", (self._phase, "cyan"), left)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        grid.add_row("progress", ProgressBar(total=max(self.steps, 1), completed=self.done, width=60))
        if self._rewards:
            grid.add_row("reward", f"{self._rewards[-1]:.3f}  {bars(self._rewards[-60:])}")
        for label, text in _numbers(self._metrics):
            grid.add_row(label, text)
        return Group(head, grid)


def _numbers(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of what is shown of a step beside its reward."""
    rows: list[tuple[str, str]] = []
    for label, key, form in (("loss", "actor/loss", "{:.4g}"), ("loss", "sft/loss", "{:.4f}"),
                             ("tokens/s", "rollout/tokens_per_second", "{:,.0f}"),
                             ("length", "response/length_mean", "{:.1f} tokens"), ("explained", "critic/explained_variance", "{:.2f}"),
                             ("gap", "actor/log_prob_gap_max", "{:.1e}")):
        if isinstance(metrics.get(key), (int, float)):
            rows.append((label, form.format(metrics[key])))
    rows += [(key, f"{value:.3f}") for key, value in metrics.items() if key.startswith("eval/") and isinstance(value, (int, float))]
    times = phase_times(metrics)
    return rows + ([("time", times)] if times else [])


def phase_times(metrics: Mapping[str, Any]) -> str:
    """Seconds by phase, such as "rollout 1.2 s, update 0.8 s"; phases under 5 ms are left out."""
    known = [(p, metrics.get(f"time/{p}_s")) for p in _PHASES]
    return ", ".join(f"{p.replace('_', '-')} {s:.2f} s" for p, s in known if isinstance(s, (int, float)) and s >= 0.005)


def step_line(step: int, steps: int, metrics: Mapping[str, Any], title: str = "train") -> str:
    """A step as one plain line."""
    parts = [f"{title} step {step}/{steps}"]
    if isinstance(metrics.get("reward/mean"), (int, float)):
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    return "  ".join(parts + [f"{label} {text}" for label, text in _numbers(metrics)])


def duration(seconds: float) -> str:
    """Seconds in words: 8 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def bars(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """`values` as unicode bars, one character each, between `low` and `high` (default: their range)."""
    if not values:
        return ""
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, max(0, int((v - low) / span * 8)))] for v in values)


def curve(values: Sequence[float], width: int = 60) -> list[float]:
    """`values` as at most `width` means of neighbours."""
    n = min(width, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)] if n else []
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def print_summary(run_dir: str | Path, command: str, before: Sequence[Mapping[str, Any]] = (), after: Sequence[Mapping[str, Any]] = (),
                  console: Console | None = None) -> None:
    """The end of a run: reward curve, held-out scores, answers before and after, files written, how to continue.

    before and after: objects with `prompt`, `response`, `reward` of the same held-out prompts in the same order.
    command: the shell command that continues the run.
    """
    console = console or Console(highlight=False)
    rows = read_metrics(run_dir)
    console.print()
    _print_rewards(console, rows)
    _print_evaluation(console, rows)
    if before and after:
        console.print("Answers to held-out prompts, with their reward", markup=False)
        console.print(_answers(before, after))
    files = sorted(_shown_files(Path(run_dir)))
    if files:
        console.print(f"Written to {run_dir}:", markup=False, soft_wrap=True)
        for line in files:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print("To continue:", markup=False)
    console.print(f"  {command}", markup=False, soft_wrap=True)


def _print_rewards(console: Console, rows: list[dict[str, Any]]) -> None:
    pairs = [(row["step"], float(row["reward/mean"])) for row in rows if isinstance(row.get("reward/mean"), (int, float))]
    if not pairs:
        return
    values = [v for _, v in pairs]
    unit = 0 <= min(values) and max(values) <= 1
    low, high = (0.0, 1.0) if unit else (min(values), max(values))
    first, last = values[:5], values[-10:]
    console.print(f"Mean reward, steps {pairs[0][0]} to {pairs[-1][0]} (bars from {low:g} to {high:g})", markup=False)
    console.print(f"  {bars(curve(values), low, high)}", markup=False, soft_wrap=True)
    console.print(f"  first {len(first)} steps {sum(first) / len(first):.3f}, last {len(last)} steps {sum(last) / len(last):.3f}\n",
                  markup=False)


def _print_evaluation(console: Console, rows: list[dict[str, Any]]) -> None:
    keys = sorted({k for row in rows for k in row if k.startswith("eval/")})
    seen = {k: [(row["step"], row[k]) for row in rows if isinstance(row.get(k), (int, float))] for k in keys}
    lines = [f"  {k:<24} step {v[0][0]}: {v[0][1]:.3f}   step {v[-1][0]}: {v[-1][1]:.3f}" for k, v in seen.items() if v]
    if lines:
        console.print("Held-out prompts", markup=False)
        console.print("\n".join(lines) + "\n", markup=False, soft_wrap=True)


def _answers(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, overflow="fold")
    for one, other in zip(before, after, strict=True):
        cells = [Text(_short(one["prompt"]))]
        cells += [Text(f"{_short(s['response'])}  ({s['reward']:g})", style="green" if s["reward"] > 0 else "") for s in (one, other)]
        table.add_row(*cells)
    return table


def _short(text: str) -> str:
    return textwrap.shorten(" ".join(str(text).split()), 60, placeholder=" …") or "(empty)"


def _shown_files(run_dir: Path) -> list[str]:
    """Files of the run directory, and its folders with how many files they hold."""
    shown = []
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        if path.is_dir():
            count = sum(1 for p in path.rglob("*") if p.is_file())
            shown.append(f"{path.name}/ ({count} file{'s' if count != 1 else ''})")
        elif not path.name.startswith(".") and not path.name.endswith(".tmp"):
            shown.append(path.name)
    return shown
