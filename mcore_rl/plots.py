"""Pictures of a run from its metrics.jsonl: plots/*.png."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_rl.outputs import read_metrics

_COLOURS = ("#3b6ea8", "#d1793b", "#4f9a63", "#a6557a", "#7a6bb5", "#8a8a3c", "#5b8c93")
Row = dict[str, Any]


def write_plots(run_dir: str | Path) -> list[Path]:
    """Draw reward, evaluation, kl, lengths and phase_times (those that have numbers); returns the files, [] without metrics."""
    rows = read_metrics(run_dir)
    drawings: dict[str, Callable[[Any, list[Row]], bool]] = {
        "reward": _reward, "evaluation": _evaluation, "kl": _kl, "lengths": _lengths, "phase_times": _phase_times}
    written: list[Path] = []
    if not rows:
        return written
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directory = Path(run_dir) / "plots"
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in drawings.items():
        figure = Figure(figsize=(7.0, 3.8), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)  # no pyplot: no global state, no display
        axes = figure.add_subplot()
        if draw(axes, rows):
            _finish(figure, axes)
            figure.savefig(directory / f"{name}.png")
            written.append(directory / f"{name}.png")
    return written


def _finish(figure: Any, axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:  # below the axes, where it hides no curve
        figure.legend(handles, labels, frameon=False, ncols=len(handles) if len(handles) < 4 else 4 if len(handles) > 4 else 2, fontsize=9,
                      loc="outside lower center")


def _column(rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    pairs = [(int(row["step"]), float(row[key])) for row in rows if isinstance(row.get(key), (int, float))]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def _line(axes: Any, rows: list[Row], key: str, colour: str, label: str, **style: Any) -> bool:
    steps, values = _column(rows, key)
    if values:
        marker = {"marker": "o", "markersize": 3.5} if len(values) <= 40 else {}
        axes.plot(steps, values, color=colour, label=label, **{"linewidth": 1.6, **marker, **style})
    return bool(values)


def moving_mean(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values at each place."""
    return [sum(values[max(0, i - width + 1):i + 1]) / min(i + 1, width) for i in range(len(values))]


def _reward(axes: Any, rows: list[Row]) -> bool:
    steps, values = _column(rows, "reward/mean")
    if not values:
        return False
    spread = {int(r["step"]): float(r["reward/std"]) for r in rows if isinstance(r.get("reward/std"), (int, float))}
    axes.plot(steps, values, color=_COLOURS[0], alpha=0.45, linewidth=1.0, marker="o", markersize=2.5, label="mean of the step")
    width = max(2, min(10, len(values) // 5))
    if len(values) >= 6:
        axes.plot(steps, moving_mean(values, width), color=_COLOURS[0], linewidth=2.2, label=f"mean of {width} steps")
    if spread and all(s in spread for s in steps):
        bounds = [(v - spread[s], v + spread[s]) for s, v in zip(steps, values, strict=True)]
        unit = 0 <= min(values) and max(values) <= 1  # pass rates: the band ends where rewards do
        clip = (lambda v: min(max(v, 0.0), 1.0)) if unit else (lambda v: v)
        axes.fill_between(steps, [clip(b[0]) for b in bounds], [clip(b[1]) for b in bounds], color=_COLOURS[0], alpha=0.10, linewidth=0,
                          label="± one standard deviation of samples")
        if unit:
            axes.set_ylim(-0.03, 1.05)
    axes.set_ylabel("reward")
    axes.set_title("Reward of training samples", loc="left")
    return True


def _evaluation(axes: Any, rows: list[Row]) -> bool:
    keys = sorted({k for row in rows for k in row if k.startswith("eval/") and not k.endswith(("_s", "length_mean", "/prompts", "count", "weights_version"))})
    # over the weights that were measured: a step's record holds the evaluation of the weights it started from
    rows = [{**row, "step": row.get("eval/weights_version", row["step"])} for row in rows]
    drawn = [_line(axes, rows, key, _COLOURS[i % len(_COLOURS)], key.removeprefix("eval/")) for i, key in enumerate(keys)]
    values = [v for key in keys for v in _column(rows, key)[1]]
    if values and 0 <= min(values) and max(values) <= 1:
        axes.set_ylim(-0.03, 1.05)
    axes.set_title("Held-out prompts", loc="left")
    axes.set_ylabel("score" if len(keys) != 1 else keys[0].removeprefix("eval/"))
    return any(drawn)


def _kl(axes: Any, rows: list[Row]) -> bool:
    drawn = [_line(axes, rows, key, _COLOURS[i], label, linewidth=0.4, marker="o", markersize=3) for i, (key, label) in enumerate(
        [("actor/kl_to_old", "KL to the old policy"), ("actor/kl_to_reference", "KL to the reference"),
         ("actor/log_prob_gap_max", "largest log-prob gap, trainer - engine"),
         ("actor/ratio_max_deviation", "largest |ratio - 1| at first update")])]
    values = [abs(v) for line in axes.get_lines() for v in line.get_ydata()]
    if any(values):  # zeros stay visible, 1e-7 and 1e-1 share one picture
        smallest = min(v for v in values if v)
        axes.set_yscale("symlog", linthresh=max(smallest, 1e-9))
        if not any(v < 0 for line in axes.get_lines() for v in line.get_ydata()):
            axes.set_ylim(bottom=-0.3 * max(smallest, 1e-9))
    axes.set_title("Distance between policies", loc="left")
    axes.set_ylabel("nats (logarithmic)" if any(values) else "nats")
    return any(drawn)


def _lengths(axes: Any, rows: list[Row]) -> bool:
    if not _line(axes, rows, "response/length_mean", _COLOURS[0], "mean length"):
        return False
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens")
    axes.set_title("Responses", loc="left")
    steps, cut = _column(rows, "response/truncated_fraction")
    if cut:
        right = axes.twinx()
        right.plot(steps, cut, color=_COLOURS[1], linewidth=1.2, linestyle="--")
        right.set_ylim(-0.03, 1.05)
        right.set_ylabel("fraction cut at the limit", color=_COLOURS[1])
        right.spines[["top"]].set_visible(False)
        axes.plot([], [], color=_COLOURS[1], linestyle="--", linewidth=1.2, label="cut at the limit (right scale)")
    return True


def _phase_times(axes: Any, rows: list[Row]) -> bool:
    names = ("rollout", "reward", "log_probs", "update", "sync", "checkpoint", "evaluation")
    phases = [k for k in names if _column(rows, f"time/{k}_s")[1]]
    rows = [row for row in rows if any(isinstance(row.get(f"time/{k}_s"), (int, float)) for k in phases)]
    if not rows:
        return False
    steps = [int(row["step"]) for row in rows]
    bottom = [0.0] * len(rows)
    for i, phase in enumerate(phases):
        values = [float(row.get(f"time/{phase}_s") or 0.0) for row in rows]
        axes.bar(steps, values, bottom=bottom, width=0.85, color=_COLOURS[i % len(_COLOURS)], label=phase.replace("_", "-"))
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    axes.set_ylabel("seconds")
    axes.set_title("Time of a step by phase", loc="left")
    return True
