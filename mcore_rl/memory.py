"""Who holds memory when: trainer and engine on the same devices take turns (`actor.offload`).

After the update the optimizer and the gradients leave; the engine's weights come back and are synchronised; with `all` the trainer's
weights leave too; only then are keys and values made. After the rollout the engine sleeps and what the next phase needs returns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mcore_rl.sample import Batch
from parallel.memory import forget_peak, peak
from parallel.offload import TRAINED, Part

if TYPE_CHECKING:
    from mcore_rl.run import Run


def before_sync(run: Run, batch: Batch) -> None:
    """The optimizer and the gradients leave, the engine's weights wake; the trainer's weights are needed and stay."""
    if run.config.offloads:
        with _timed(batch):
            for role in trained_roles(run):
                _give_up(run, role, TRAINED)
            run.actor.training.memory.restore(["parameters"])
            run.rollout.engine.wake(["weights"])


def after_sync(run: Run, batch: Batch) -> None:
    """The trainer's weights leave, with `all`; the engine may take memory for keys and values."""
    if run.config.offloads:
        with _timed(batch):
            if run.config.actor.offload == "all":
                for role in (*trained_roles(run), run.reference):
                    _give_up(run, role, ["parameters"])
            run.rollout.engine.wake(["kv_cache"])


def after_rollout(run: Run, batch: Batch) -> None:
    """The engine sleeps, weights and cache: the next sync brings both back. The weights of actor and critic return."""
    if run.config.offloads:
        with _timed(batch):
            run.rollout.engine.sleep(["kv_cache", "weights"])
            for role in trained_roles(run):
                role.training.memory.restore(["parameters"])


def before_reference(run: Run, batch: Batch) -> None:
    """The reference's weights return; they leave again after its log-probs."""
    if run.config.actor.offload == "all":
        with _timed(batch):
            run.reference.training.memory.restore(["parameters"])


def after_reference(run: Run, batch: Batch) -> None:
    if run.config.actor.offload == "all":
        with _timed(batch):
            _give_up(run, run.reference, ["parameters"])


def before_update(run: Run, batch: Batch, role: Any) -> None:
    """Everything that training a role needs is back."""
    if run.config.offloads:
        with _timed(batch):
            role.training.memory.restore(["parameters", *TRAINED])


@contextlib.contextmanager
def whole(run: Run, batch: Batch) -> Iterator[None]:
    """Inside, all of actor and critic is there, for a checkpoint; the engine stays as it is, so for that time both sides are held."""
    away: list[tuple[Part, ...]] = [role.training.memory.away for role in trained_roles(run)]
    with _timed(batch):
        for role, parts in zip(trained_roles(run), away, strict=True):
            role.training.memory.restore(parts)
    yield
    with _timed(batch):
        for role, parts in zip(trained_roles(run), away, strict=True):
            _give_up(run, role, parts)


def trained_roles(run: Run) -> list[Any]:
    return [role for role in (run.actor, run.critic) if role is not None]


def _give_up(run: Run, role: Any, parts: Any) -> None:
    if role is not None:
        role.training.memory.offload(parts, run.directory)


@contextlib.contextmanager
def _timed(batch: Batch) -> Iterator[None]:
    """`time/offload_s` is part of the seconds of the phases that it happens in."""
    started = time.perf_counter()
    yield
    batch.metrics["time/offload_s"] = batch.metrics.get("time/offload_s", 0.0) + time.perf_counter() - started


@contextlib.contextmanager
def watched(run: Run, name: str, batch: Batch) -> Iterator[None]:
    """Most memory in use inside, as `memory/peak_<name>` of this rank; no metric where the system does not tell."""
    device = run.device.torch
    forget_peak(device)
    yield
    key, value = f"memory/peak_{name}", peak(device)
    if value is not None:
        batch.metrics[key] = max(batch.metrics.get(key, 0.0), float(value))


def report(run: Run, batch: Batch) -> None:
    """Collective, at the end of a step: every `memory/*` metric is the largest of all ranks."""
    for name, role in (("actor", run.actor), ("critic", run.critic)):
        if role is not None:
            batch.metrics[f"memory/{name}_optimizer_bytes"] = float(role.training.memory.bytes("optimizer"))
    every = run.exchange.gather({k: v for k, v in batch.metrics.items() if k.startswith("memory/")})
    batch.metrics.update({k: max(values.get(k, 0.0) for values in every) for k in {k for values in every for k in values}})
