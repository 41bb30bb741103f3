"""Supervised fine-tuning on prompt/response rows, with the same engine and data path as reinforcement learning.

    torchrun --nproc-per-node 2 -m mcore_rl sft configs/demo_warm_up.yaml
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from checkpoint.hf import export_hf
from mcore_rl.algorithms import loss_counts, loss_weights
from mcore_rl.data import SftExample
from mcore_rl.memory import report
from mcore_rl.phases import phase
from mcore_rl.record import Recorder
from mcore_rl.run import Run
from mcore_rl.sample import Batch
from resharding.layouts import mcore_party


def train_supervised(run: Run, examples: Sequence[SftExample], recorder: Recorder) -> None:
    """Run `sft.steps` optimizer steps on the mean loss of response tokens, then write the model as a HF directory."""
    sft = run.config.sft
    assert sft is not None
    step_on_batch = _step(examples)
    for step in range(run.step + 1, sft.steps + 1):
        started = time.perf_counter()
        batch = Batch(step, rows=run.prompts.take(sft.batch_size))
        step_on_batch(run, batch)
        run.step = step
        report(run, batch)
        every = run.config.checkpoint.every
        if every and (step % every == 0 or step == sft.steps):
            recorder.checkpoint(run, batch)
        batch.metrics["time/step_s"] = time.perf_counter() - started
        recorder.record(run, batch)
    export(run, sft.output)


def _step(examples: Sequence[SftExample]) -> Any:
    @phase("time/update_s", reads=("rows",))
    def supervised_update(run: Run, batch: Batch) -> None:
        """One optimizer step on the log-likelihood of the responses."""
        chosen = [examples[i] for i in batch.rows]
        masks = [torch.tensor(e.mask, dtype=torch.bool) for e in chosen]
        counts = loss_counts(masks)
        weights = [loss_weights(m, counts, "token-mean").to(run.device.torch) for m in masks]

        def loss(i: int, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
            value = -(weights[i] * log_probs).sum()
            return value, value.detach()

        reports, grad_norm, lr = run.actor.update([e.token_ids for e in chosen], range(len(chosen)), run.config.actor.micro_batch_size, 1.0, loss,
                                                 [e.mask for e in chosen])
        batch.metrics.update({"sft/loss": torch.stack(reports).double().sum().item(), "sft/grad_norm": grad_norm,
                              "sft/learning_rate": lr, "sft/tokens": float(counts[0]), **run.actor.load()})

    return supervised_update


def export(run: Run, directory: str) -> None:
    """Write the actor's weights as a Hugging Face directory (collective)."""
    training = run.actor.training
    party = mcore_party(run.model, training.parallel, run.world_size, training.dtype, training.names)
    export_hf(directory, party, training.tensors, run.model, training.dtype, run.config.model.path, run.rank, overwrite=True)
