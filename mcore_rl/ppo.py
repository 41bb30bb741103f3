"""PPO as pure functions on tensors: token rewards, generalised advantage estimation, whitening, the value loss.

A value, a reward and an advantage stand at the token they are about: entry t of a sample's columns [tokens] is about the choice of
token t, given the tokens before it. Only tokens that the policy chose (`mask`) are steps of the process; what stands between two turns
(a tool's answer, the user's next words) is part of the next step's state, takes no time and is never bootstrapped from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def token_rewards(reward: float, mask: Tensor, kl: Tensor | None = None, kl_coefficient: float = 0.0) -> Tensor:
    """Rewards [tokens], float64: the sample's reward at its last chosen token, less kl_coefficient x `kl` [tokens] at every chosen one.

    A sample without a chosen token gets none (Ouyang et al., arXiv:2203.02155, put the KL to the reference into the reward so).
    """
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    if kl is not None:
        rewards -= kl_coefficient * kl.double()
    rewards *= mask
    chosen = mask.nonzero().flatten()
    if len(chosen):
        rewards[chosen[-1]] += reward
    return rewards


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of one sample, both [tokens] float32, 0 where `mask` is 0 (Schulman et al., arXiv:1506.02438, eq. 16).

    rewards, values, mask [tokens]. Over the chosen tokens only, from the last: delta = reward + gamma x next value - value, advantage =
    delta + gamma x lam x next advantage; return = advantage + value. The value after the last chosen token is 0: a sample ends there,
    also one that was cut at its largest length.
    """
    steps = mask.nonzero().flatten().tolist()
    advantages, returns = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    r, v = rewards.double().tolist(), values.double().tolist()
    after, next_value = 0.0, 0.0
    for t in reversed(steps):
        after = r[t] + gamma * next_value - v[t] + gamma * lam * after
        next_value = v[t]
        advantages[t], returns[t] = after, after + v[t]
    return advantages.float(), returns.float()


def whiten(columns: Sequence[Tensor], masks: Sequence[Tensor], eps: float) -> list[Tensor]:
    """Values [tokens] of all samples of the step, less their mean, over their standard deviation (n - 1) + eps; 0 where `masks` is 0.

    One mean over all tokens of all ranks, exactly summed: the caller holds the whole batch. Less than two tokens, or equal ones, become 0.
    """
    every = [x for column, mask in zip(columns, masks, strict=True) for x in column[mask != 0].double().tolist()]
    if len(every) < 2 or max(every) == min(every):
        return [torch.zeros_like(column) for column in columns]
    mean = math.fsum(every) / len(every)
    scale = math.sqrt(math.fsum((x - mean) ** 2 for x in every) / (len(every) - 1)) + eps
    return [((column.double() - mean) / scale * (mask != 0)).float() for column, mask in zip(columns, masks, strict=True)]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error per token, and where the clip decides it, both [tokens], float32.

    With `clip`, the larger of the errors of the value and of old value +- clip around it (Schulman et al.'s baselines, ppo2), so that one
    update moves a value no further than that. None: no clipping.
    """
    values, old_values, returns = values.float(), old_values.float(), returns.float()
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    moved = values - old_values
    clipped = (old_values + moved.clamp(-clip, clip) - returns) ** 2
    decides = ((moved.abs() > clip) & (clipped > plain)).detach()
    return 0.5 * torch.where(decides, clipped, plain), decides


def explained_variance(values: Sequence[Tensor], returns: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
    """1 - variance(returns - values) / variance(returns) over all chosen tokens: 1 is a perfect critic, 0 one that knows the mean only.

    0 where the returns do not vary.
    """
    v, r = (torch.cat([c[m != 0].double() for c, m in zip(columns, masks, strict=True)]) if columns else torch.zeros(0, dtype=torch.float64)
            for columns in (values, returns))
    spread = r.var(unbiased=False).item() if len(r) else 0.0
    return 1.0 - (r - v).var(unbiased=False).item() / spread if spread > 0 else 0.0
