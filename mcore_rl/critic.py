"""The phases of a PPO step that a critic adds: values, advantages by GAE, and the critic's own update."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl import memory
from mcore_rl.algorithms import kl_penalty, loss_counts, loss_weights, training_mask
from mcore_rl.phases import phase
from mcore_rl.ppo import explained_variance, gae, token_rewards, value_loss, whiten
from mcore_rl.run import Run
from mcore_rl.sample import Batch


@phase("time/values_s", reads=("token_ids", "mask"), adds=("values",))
def values(run: Run, batch: Batch) -> None:
    """The critic's value before every token that the policy chose, from the weights this step starts from."""
    ids, masks = [s.token_ids for s in batch.samples], [s.mask for s in batch.samples]
    batch.put("values", run.critic.values(ids, run.config.critic.value_micro_batch_size, masks))


@phase("time/advantages_s", reads=("mask", "rewards", "values"), adds=("advantages", "returns"))
def token_advantages(run: Run, batch: Batch) -> None:
    """Advantages and returns of every chosen token, by GAE over the policy's tokens; advantages are whitened over the whole step."""
    a = run.config.algorithm
    masks = [torch.tensor(s.mask) for s in batch.samples]
    kl: list[Tensor | None] = [None] * len(masks)
    if a.kl_in == "reward":
        kl = [kl_penalty(old, reference, a.kl_estimator) for old, reference in zip(batch["old_log_probs"], batch["reference_log_probs"], strict=True)]
    rewards = [token_rewards(float(r), m, k, a.kl_coefficient) for r, m, k in zip(batch["rewards"], masks, kl, strict=True)]
    found = [gae(r, v, m, a.gamma, a.lam) for r, v, m in zip(rewards, batch["values"], masks, strict=True)]
    trained = _training_masks(run, batch)
    advantages = [x for x, _ in found]
    batch.put("advantages", whiten(advantages, trained, a.advantage_eps) if a.advantage_normalisation == "std" else advantages)
    batch.put("returns", [x for _, x in found])
    batch.metrics["critic/explained_variance"] = explained_variance(batch["values"], batch["returns"], trained)
    every = torch.cat([v[m] for v, m in zip(batch["values"], masks, strict=True)])
    batch.metrics["critic/value_mean"] = every.double().mean().item() if len(every) else 0.0
    if a.kl_in == "reward":
        chosen = torch.cat([k[m] for k, m in zip(kl, masks, strict=True) if k is not None])
        batch.metrics["actor/kl_to_reference"] = chosen.double().mean().item() if len(chosen) else 0.0


def _training_masks(run: Run, batch: Batch) -> list[Tensor]:
    return [training_mask(torch.tensor(s.mask), s.finish_reason, run.config.algorithm.mask_truncated) for s in batch.samples]


@phase("time/critic_update_s", reads=("token_ids", "mask", "values", "returns"))
def update_critic(run: Run, batch: Batch) -> None:
    """Regress the critic on the returns, over the step's mini-batches."""
    c = run.config.critic
    memory.before_update(run, batch, run.critic)
    masks, order = _training_masks(run, batch), range(len(batch.samples))
    size = -(-len(order) // c.updates_per_step)
    sums, grad_norm, lr = [], 0.0, 0.0
    for k in range(0, len(order), size):
        reports, grad_norm, lr = _update_once(run, batch, masks, order[k:k + size])
        sums.append(torch.stack([r.double() for r in reports]))
    every = torch.cat(sums)
    batch.metrics.update({
        "critic/loss": every[:, 0].sum().item() / len(sums), "critic/grad_norm": grad_norm, "critic/learning_rate": lr,
        "critic/clip_fraction": every[:, 2].sum().item() / max(every[:, 1].sum().item(), 1.0)})


def _update_once(run: Run, batch: Batch, masks: list[Tensor], chosen: range) -> tuple[list[Tensor], float, float]:
    """One optimizer step. Each sample reports [loss, tokens, sum clipped]."""
    c, a, device = run.config.critic, run.config.algorithm, run.device.torch
    counts = loss_counts([masks[i] for i in chosen])  # global: every rank holds the whole batch
    weights = {i: loss_weights(masks[i], counts, a.loss_aggregation, run.config.rollout.max_tokens) for i in chosen}

    def loss(i: int, new: Tensor) -> tuple[Tensor, Tensor]:
        mask = masks[i].to(device)
        per_token, clipped = value_loss(new, batch["values"][i].to(device), batch["returns"][i].to(device), c.value_clip)
        total = (weights[i].to(device) * per_token).sum()
        return total, torch.stack([total.detach(), mask.sum(), clipped[mask].sum()])

    wanted = [m.tolist() for m in masks]
    return run.critic.update([s.token_ids for s in batch.samples], chosen, c.micro_batch_size, 1.0, loss, wanted)
