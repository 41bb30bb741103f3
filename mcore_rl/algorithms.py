"""GRPO as pure functions on tensors: advantages from groups, the clipped loss, the KL penalty, and what each token weighs.

Means are taken once, over global counts: `loss_counts` is summed over all data-parallel ranks, `loss_weights` turns the
sum into a weight per token, and the loss of a step is the plain sum of weight x loss over all tokens of all micro-batches
of all ranks. So the split into micro-batches and ranks cannot matter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

_LOG_RATIO_CAP = 20.0  # exp(20) is about 5e8: finite in float32, also squared; far beyond any clip range


def group_advantages(rewards: Tensor, groups: Tensor | Sequence[int], normalisation: str = "std", eps: float = 1e-6) -> Tensor:
    """Rewards minus the mean of their group, [samples], float32 (Shao et al., arXiv:2402.03300, section 4.1).

    rewards [samples]; groups [samples]: equal numbers belong together, wherever they stand. normalisation "std" divides by
    the group's sample standard deviation (n - 1) + eps, "none" does not (Liu et al., arXiv:2503.20783). A group of one, or
    of equal rewards, carries no signal and gives exactly 0. Sums are exact (fsum), so order does not matter.
    Raises ValueError for rewards that are not finite, lengths that differ, or another normalisation.
    """
    if normalisation not in ("std", "none"):
        raise ValueError(f"normalisation {normalisation!r}; allowed: std, none")
    values = [float(v) for v in rewards.tolist()]
    result = [0.0] * len(values)
    for members in _members(values, groups):
        mine = [values[i] for i in members]
        if max(mine) == min(mine):  # decided on the values: in float32 the mean of eight 0.7 is not 0.7
            continue
        mean = math.fsum(mine) / len(mine)
        scale = 1.0
        if normalisation == "std":
            scale = math.sqrt(math.fsum((v - mean) ** 2 for v in mine) / (len(mine) - 1)) + eps
        for i in members:
            result[i] = (values[i] - mean) / scale
    return torch.tensor(result, dtype=torch.float32, device=rewards.device)


def groups_without_signal(rewards: Tensor, groups: Tensor | Sequence[int]) -> int:
    """How many groups have equal rewards (or one member) and so teach nothing."""
    values = [float(v) for v in rewards.tolist()]
    return sum(len({values[i] for i in members}) == 1 for members in _members(values, groups))


def _members(values: list[float], groups: Tensor | Sequence[int]) -> list[list[int]]:
    ids = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(ids) != len(values):
        raise ValueError(f"{len(values)} rewards, but {len(ids)} group ids")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"rewards must be finite; sample {next(i for i, v in enumerate(values) if not math.isfinite(v))} is not")
    members: dict[int, list[int]] = defaultdict(list)
    for position, group in enumerate(ids):
        members[group].append(position)
    return list(members.values())


def policy_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss per token and where the clip is active, both [tokens] (Schulman et al., arXiv:1707.06347, eq. 7).

    All inputs [tokens]; computed in float32. ratio = exp(log_probs - old_log_probs) is clipped to [1 - clip_low,
    1 + clip_high]. Log-ratios are held within +-20 before exp, so loss and gradient stay finite; beyond, the gradient is 0.
    """
    advantages = advantages.float()
    ratio = (log_probs.float() - old_log_probs.float()).clamp(-_LOG_RATIO_CAP, _LOG_RATIO_CAP).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    active = ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))
    return loss, active.detach()


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k3", cap: float | None = 10.0) -> Tensor:
    """KL(policy || reference) estimated per sampled token, [tokens], float32 (Schulman, joschu.net/blog/kl-approx.html).

    With d = log_probs - ref_log_probs of tokens that the policy sampled:
      k1 = d (unbiased, signed); k2 = d^2 / 2; k3 = exp(-d) - 1 + d (unbiased, never negative).
    k3 is held at `cap` (None: no cap) from above; there its gradient is 0. Its exponent is held at 20, before exp, so value
    and gradient are finite for any input. Raises ValueError for another estimator.
    """
    d = log_probs.float() - ref_log_probs.float()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        k3 = torch.expm1((-d).clamp(max=_LOG_RATIO_CAP)) + d.clamp(min=-_LOG_RATIO_CAP)
        return k3 if cap is None else k3.clamp(max=cap)
    raise ValueError(f"KL estimator {estimator!r}; allowed: k1, k2, k3")


def training_mask(mask: Tensor, finish_reason: str, mask_truncated: bool) -> Tensor:
    """The loss mask [tokens] of a sample: nothing of a truncated one (finish reason "length") where mask_truncated is set.

    Decided by the finish reason, not by the last token: a response of exactly the largest length that ends by itself stays.
    """
    return torch.zeros_like(mask) if mask_truncated and finish_reason == "length" else mask


def loss_counts(masks: Sequence[Tensor]) -> Tensor:
    """(trained tokens, samples with at least one) of this rank's whole mini-batch, [2] int64; sum it over data-parallel ranks."""
    tokens = [int((m != 0).sum()) for m in masks]
    return torch.tensor([sum(tokens), sum(n > 0 for n in tokens)], dtype=torch.int64)


def loss_weights(mask: Tensor, counts: Tensor, aggregation: str, fixed_length: int | None = None) -> Tensor:
    """What each token of one sample weighs in the loss of the step, [tokens] float32, 0 where `mask` [tokens] is 0.

    counts: `loss_counts` summed over all ranks. "token-mean": 1 / tokens (DAPO, arXiv:2503.14476); "sequence-mean":
    1 / (samples x tokens of this sample) (GRPO as published); "fixed-length": 1 / (samples x fixed_length) (Dr. GRPO,
    arXiv:2503.20783). All weights are 0 where nothing is trained. Raises ValueError for another aggregation.
    """
    trained = (mask != 0).to(torch.float64)
    own, (tokens, samples) = int(trained.sum()), (int(n) for n in counts)
    if aggregation == "fixed-length" and not fixed_length:
        raise ValueError("aggregation 'fixed-length' needs fixed_length, the longest response in tokens")
    denominators = {"token-mean": tokens, "sequence-mean": samples * own, "fixed-length": samples * (fixed_length or 0)}
    if aggregation not in denominators:
        raise ValueError(f"loss aggregation {aggregation!r}; allowed: {', '.join(denominators)}")
    return (trained / max(denominators[aggregation], 1)).float() if own else torch.zeros_like(trained, dtype=torch.float32)
