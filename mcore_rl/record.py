"""What outlives a step: metrics, samples, checkpoints, plots. Rank 0 writes; checkpoints are written by all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoint.distributed import load_training, save_training
from checkpoint.mcore import describe_model
from checkpoint.publish import publishing
from checkpoint.rng import load_rng, save_rng
from checkpoint.run_state import keep_newest, read_state, resume_point, write_state
from checkpoint.together import on_rank_zero
from mcore_rl.evaluation import forget_answers
from mcore_rl.memory import whole
from mcore_rl.outputs import MetricsWriter, SamplesWriter, read_metrics
from mcore_rl.plots import write_plots
from mcore_rl.progress import Progress
from mcore_rl.run import Run
from mcore_rl.sample import Batch, Sample
from parallel.errors import UserError
from parallel.training import TrainingModel

logger = logging.getLogger(__name__)
CRITIC = "critic"  # the directory below a checkpoint that holds the value model: a model directory of its own

# every record of a training run has them, 0 where a phase did not run
ALWAYS = ("time/rollout_s", "time/reward_s", "time/log_probs_s", "time/advantages_s", "time/update_s", "time/sync_s",
          "time/checkpoint_s", "time/evaluation_s")


class Recorder:
    """Writes what a run leaves in its directory, and brings a run back to its newest checkpoint."""

    def __init__(self, run: Run, progress: Progress | None = None) -> None:
        c = run.config
        self.progress = progress
        self.writes = run.rank == 0
        self._metrics: MetricsWriter | None = None
        if self.writes:
            run.directory.mkdir(parents=True, exist_ok=True)
            self._metrics = MetricsWriter(run.directory, c.log.tensorboard, c.log.wandb, c.to_dict())
            self._samples = SamplesWriter(run.directory, c.log.samples_per_step)

    def resume(self, run: Run) -> bool:
        """Collective: continue from the newest complete checkpoint, where there is one. Returns whether there was."""
        found = resume_point(run.directory)
        if found is not None:
            self._resume_from(run, found)
        elif self._metrics is not None:
            if dropped := len(read_metrics(run.directory)):
                self._note(f"{run.directory} holds {dropped} recorded steps and no checkpoint: the run starts over and they are dropped")
            self._forget(0, None)
        if self.writes:
            (run.directory / "config.yaml").write_text(run.config.to_yaml())
        return found is not None

    def _resume_from(self, run: Run, found: Path) -> None:
        if run.config.run.resume == "never":
            raise UserError(f"run directory {str(run.directory)!r} holds checkpoint {found.name} and run.resume is never; "
                            "set run.resume=auto to continue it, or choose another run.dir")
        state = read_state(found)
        load_training(found, run.actor.training)
        if run.critic is not None:
            _require_critic(found)
            load_training(found / CRITIC, run.critic.training)
        elif (found / CRITIC).is_dir() and self.writes:
            logger.warning("%s holds a critic, which this run (algorithm %s) leaves behind", found, run.config.algorithm.name)
        load_rng(found, trained_roles(run))
        run.prompts.load_state(state["prompts"])
        run.step = int(state["step"])
        if self.writes and state["threads"] != torch.get_num_threads():
            logger.warning("the checkpoint was written with %d CPU threads per rank, this run has %d: results will differ in the last bits; "
                           "set run.threads=%d for the same ones", state["threads"], torch.get_num_threads(), state["threads"])
        if self._metrics is not None:
            self._forget(run.step, state["record"])
            self._note(f"resumed from {found} (step {run.step})")

    def _forget(self, step: int, record: dict[str, Any] | None) -> None:
        """Go back to `step` in everything that is written step by step; its record may not have been written yet."""
        assert self._metrics is not None
        self._metrics.truncate_after(step)
        self._samples.truncate_after(step)
        forget_answers(self._metrics.run_dir, step)
        if record is not None and not any(r["step"] == step for r in read_metrics(self._metrics.run_dir)):
            self._metrics.write(step, record)

    def checkpoint(self, run: Run, batch: Batch) -> None:
        """Collective: write and publish a checkpoint of the step, with the step's record in it, and delete old ones."""
        c = run.config
        started = time.perf_counter()
        self._write_samples(batch)  # before the checkpoint: a resumed run does not come back to this step
        with publishing(run.directory, batch.step, run.lease) as directory, whole(run, batch):
            save_training(directory, run.actor.training)
            if run.critic is not None:
                save_training(directory / CRITIC, run.critic.training)
            save_rng(directory, trained_roles(run))
            if self.writes:
                describe_model(directory, run.actor.training, c.model.path)
                if run.critic is not None:
                    describe_model(directory / CRITIC, run.critic.training, c.critic.path or c.model.path)
                write_state(directory, {"step": batch.step, "prompts": run.prompts.state(), "record": finished(batch),
                                        "threads": torch.get_num_threads(), "config": run.config.to_dict()})
        on_rank_zero(lambda: keep_newest(run.directory, run.config.checkpoint.keep), "deleting old checkpoints")
        batch.metrics["time/checkpoint_s"] = time.perf_counter() - started

    def record(self, run: Run, batch: Batch) -> None:
        """Write the step's metrics and its first samples."""
        if self._metrics is None:
            return
        metrics = finished(batch)
        if "time/checkpoint_s" not in batch.metrics:
            self._write_samples(batch)
        self._metrics.write(batch.step, metrics)
        if self.progress is not None:
            self.progress.step(batch.step, metrics)
        if run.config.log.plots and (batch.step == run.config.run.steps or "time/checkpoint_s" in batch.metrics):
            write_plots(run.directory)

    def _write_samples(self, batch: Batch) -> None:
        if self.writes and batch.samples:
            shown = zip(batch.samples[:self._samples.per_step], batch["rewards"], strict=False)
            self._samples.write(batch.step, [_shown(sample, reward) for sample, reward in shown])

    def store(self, write: Callable[[Path, int, Sequence[Sample]], Path], run: Run, batch: Batch) -> None:
        """Store all samples of the step with their rewards, for rollout.replay."""
        if self.writes:
            write(run.directory / "rollouts", batch.step, [replace(s, reward=float(r)) for s, r in zip(batch.samples, batch["rewards"], strict=True)])

    def _note(self, text: str) -> None:
        if self.progress is not None:
            self.progress.note(text)
        else:
            logger.info(text)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


def trained_roles(run: Run) -> dict[str, TrainingModel]:
    """The roles that a checkpoint holds."""
    return {"actor": run.actor.training} | ({"critic": run.critic.training} if run.critic is not None else {})


def _require_critic(checkpoint: Path) -> None:
    if not (checkpoint / CRITIC).is_dir():
        raise UserError(f"checkpoint {checkpoint} holds no critic, and algorithm.name is ppo: it is of a run without one; go on with its algorithm, "
                        "or start in another run.dir with its weights as model.path (mcore-rl convert)")


def finished(batch: Batch) -> dict[str, float]:
    """The step's metrics with every key that a record always has."""
    metrics = {key: batch.metrics.get(key, 0.0) for key in ALWAYS} | dict(batch.metrics)
    seconds = metrics["time/rollout_s"]
    if "rollout/tokens" in metrics:
        metrics["rollout/tokens_per_second"] = metrics.pop("rollout/tokens") / seconds if seconds > 0 else 0.0
    return metrics


def _shown(sample: Sample, reward: float) -> dict[str, Any]:
    """A sample as people read it in samples/."""
    return {"prompt": sample.prompt, "response": sample.response, "reward": float(reward), "finish_reason": sample.finish_reason,
            "group": sample.group, "index": sample.index, "tokens": list(sample.token_ids), "mask": [int(m) for m in sample.mask],
            "version": list(sample.versions), "log_probs": list(sample.rollout_log_probs)}
