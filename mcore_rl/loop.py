"""The main loop: GRPO and PPO in one page.

    torchrun --nproc-per-node 2 -m mcore_rl train configs/demo_cpu.yaml
"""

from __future__ import annotations

import time

from mcore_rl import critic, steps
from mcore_rl.evaluation import evaluate
from mcore_rl.memory import report
from mcore_rl.record import Recorder
from mcore_rl.run import Run
from mcore_rl.sample import Batch
from mcore_rl.stored_samples import store_samples


def train(run: Run, recorder: Recorder) -> None:
    """Train from the run's step (0, or what was resumed) to `run.steps`. Raises OffPolicy where a strict gate breaks."""
    c = run.config
    last = c.run.steps
    if run.rollout is not None:
        steps.sync(run, Batch(run.step))  # the engines start from the trainer's weights
    for step in range(run.step + 1, last + 1):
        started = time.perf_counter()
        batch = Batch(step, rows=run.prompts.take())
        if c.evaluation.every and (step - 1) % c.evaluation.every == 0:
            evaluate(run, batch)  # of the weights this step starts from

        steps.generate(run, batch)
        steps.reward(run, batch)
        if c.run.only == "rollout":
            recorder.store(store_samples, run, batch)
        else:
            if not c.actor.skip_old_log_probs:
                steps.old_log_probs(run, batch)
            if run.reference is not None:
                steps.reference_log_probs(run, batch)
            if run.critic is None:
                steps.advantages(run, batch)
            else:
                critic.values(run, batch)
                critic.token_advantages(run, batch)
                critic.update_critic(run, batch)
            if run.critic is None or step > c.critic.warmup_steps:
                steps.update(run, batch)
            steps.sync(run, batch)
        run.step = step
        if c.evaluation.every and step == last and c.run.only is None:
            evaluate(run, batch)

        report(run, batch)
        if c.checkpoint.every and (step % c.checkpoint.every == 0 or step == last) and c.run.only is None:
            recorder.checkpoint(run, batch)
        batch.metrics["time/step_s"] = time.perf_counter() - started
        recorder.record(run, batch)
