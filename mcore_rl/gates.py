"""On-policy gates: what must hold at the first update of a fresh batch, and what to do when it does not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mcore_rl.sample import Batch

if TYPE_CHECKING:
    from mcore_rl.run import Run

logger = logging.getLogger(__name__)


class OffPolicy(RuntimeError):
    """An on-policy gate broke: trainer and engine (or two passes of the trainer) disagree about the same tokens."""


_EXPLANATION = {
    "actor/log_prob_gap_max": (
        "log_prob_gap_max", "trainer and engine give different log-probs for the engine's own tokens: their weights or their "
        "computation differ. Look at weights/version, at rollout.temperature and at rollout.dtype against model.dtype"),
    "actor/ratio_max_deviation": (
        "ratio_deviation_max", "the update's forward pass differs from the log-prob pass over the same tokens and weights: "
        "something depends on the micro-batching"),
}


def check_on_policy(run: Run, batch: Batch, metric: str) -> None:
    """Raise OffPolicy (or warn, with run.strict false) where `metric` is above its limit."""
    option, meaning = _EXPLANATION[metric]
    limit = {"log_prob_gap_max": run.config.log_prob_gap_gate, "ratio_deviation_max": run.config.ratio_deviation_gate}[option]
    value = batch.metrics[metric]
    if limit is None or value <= limit:
        return
    text = (f"step {batch.step}: {metric} is {value:.3g}, above algorithm.{option} {limit:.3g}: {meaning}. "
            f"Set run.strict=false to go on with a warning, or algorithm.{option}=null to lift the gate")
    if run.config.run.strict:
        raise OffPolicy(text)
    logger.warning(text)
