"""The phases of a step. Each reads like one process; who computes what on which rank is the roles' business."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_rl import memory
from mcore_rl.algorithms import group_advantages, groups_without_signal, kl_penalty, loss_counts, loss_weights, policy_loss, training_mask
from mcore_rl.gates import check_on_policy
from mcore_rl.phases import phase
from mcore_rl.run import Run
from mcore_rl.sample import Batch, Sample
from mcore_rl.stored_samples import load_samples
from trtllm_rollout.protocol import Completion, Request


@phase("time/rollout_s", reads=("rows",), adds=("token_ids", "mask", "rollout_log_probs", "versions", "finish_reason"))
def generate(run: Run, batch: Batch) -> None:
    """Sample responses for the step's prompts (or load stored ones)."""
    c = run.config.rollout
    if c.replay is not None:
        batch.samples = load_samples(c.replay, batch.step)
    else:
        seed = run.config.run.seed
        requests = [Request(g, run.rows[row].prompt_ids, run.sampling(), c.samples_per_prompt, (seed, batch.step, g))
                    for g, row in enumerate(batch.rows)]
        completions = run.rollout.generate(requests)
        batch.samples = [make_sample(run, done, batch.rows[done.request_id]) for done in completions]
        if run.config.actor.moe.replay_experts:
            batch.put("experts", [done.experts for done in completions])
        batch.metrics |= run.rollout.metrics()
        memory.after_rollout(run, batch)
    lengths = [s.response_length for s in batch.samples]
    batch.metrics["response/length_mean"] = sum(lengths) / len(lengths)
    batch.metrics["response/length_max"] = float(max(lengths))
    batch.metrics["response/truncated_fraction"] = sum(s.finish_reason == "length" for s in batch.samples) / len(lengths)
    batch.metrics["rollout/tokens"] = float(sum(lengths))


def make_sample(run: Run, done: Completion, row: int) -> Sample:
    """Prompt and completion as one trajectory of a single turn."""
    source = run.rows[row]
    n, m = len(source.prompt_ids), len(done.token_ids)
    return Sample(group=done.request_id, index=done.sample, row=row, token_ids=source.prompt_ids + done.token_ids,
                  mask=(False,) * n + (True,) * m, rollout_log_probs=(0.0,) * n + done.log_probs, versions=(-1,) * n + done.versions,
                  finish_reason=done.finish_reason, prompt=source.prompt_text,
                  response=run.tokenizer.decode(done.token_ids, skip_special_tokens=True))


@phase("time/reward_s", reads=("token_ids", "mask"), adds=("rewards",))
def reward(run: Run, batch: Batch) -> None:
    """Score every response (each rank its share)."""
    if run.config.rollout.replay is not None and all(s.reward is not None for s in batch.samples):
        rewards = [float(s.reward) for s in batch.samples if s.reward is not None]
    else:
        rewards = run.exchange.share(len(batch.samples), lambda i: run.reward(batch.samples[i].response, run.rows[batch.samples[i].row]), "rewards")
    batch.put("rewards", rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    batch.metrics["reward/mean"] = values.mean().item()
    batch.metrics["reward/std"] = values.std(unbiased=False).item()


@phase("time/log_probs_s", reads=("token_ids", "mask", "rollout_log_probs"), adds=("old_log_probs",))
def old_log_probs(run: Run, batch: Batch) -> None:
    """The trainer's log-probs of the sampled tokens, in a pass of their own, compared with the engine's."""
    c = run.config
    ids, masks = [s.token_ids for s in batch.samples], [s.mask for s in batch.samples]
    log_probs, _ = run.actor.log_probs(ids, c.actor.log_prob_micro_batch_size, c.rollout.temperature, masks, _choices(batch))
    batch.put("old_log_probs", log_probs)
    _gap(batch)
    if c.rollout.replay is None:  # stored samples come from other weights
        check_on_policy(run, batch, "actor/log_prob_gap_max")


def _choices(batch: Batch) -> Sequence[Tensor] | None:
    """The engine's choice of experts, which the actor's routers repeat; None: they choose themselves."""
    return batch.columns.get("experts")


def _gap(batch: Batch) -> None:
    """Largest and mean |trainer - engine| log-prob over the engine's tokens."""
    gaps = [(new - torch.tensor(s.rollout_log_probs))[torch.tensor(s.mask)].abs() for new, s in zip(batch["old_log_probs"], batch.samples, strict=True)]
    merged = torch.cat(gaps) if gaps else torch.zeros(0)
    batch.metrics["actor/log_prob_gap_max"] = merged.max().item() if merged.numel() else 0.0
    batch.metrics["actor/log_prob_gap_mean"] = merged.double().mean().item() if merged.numel() else 0.0


@phase("time/log_probs_s", reads=("token_ids",), adds=("reference_log_probs",))
def reference_log_probs(run: Run, batch: Batch) -> None:
    """The frozen reference's log-probs of the sampled tokens."""
    c = run.config
    ids, masks = [s.token_ids for s in batch.samples], [s.mask for s in batch.samples]
    memory.before_reference(run, batch)
    log_probs, _ = run.reference.log_probs(ids, c.actor.log_prob_micro_batch_size, c.rollout.temperature, masks)
    memory.after_reference(run, batch)
    batch.put("reference_log_probs", log_probs)


@phase("time/advantages_s", reads=("rewards",), adds=("advantages",))
def advantages(run: Run, batch: Batch) -> None:
    """Group-relative advantages, one number per sample."""
    c = run.config.algorithm
    rewards = torch.tensor(batch["rewards"], dtype=torch.float64)
    groups = torch.tensor([s.group for s in batch.samples])
    batch.put("advantages", list(group_advantages(rewards, groups, c.advantage_normalisation, c.advantage_eps)))
    batch.metrics["reward/groups_without_signal"] = float(groups_without_signal(rewards, groups))


@phase("time/update_s", reads=("token_ids", "mask", "advantages"))
def update(run: Run, batch: Batch) -> None:
    """Clipped policy-gradient updates over the step's mini-batches, with the on-policy checks at the first."""
    c = run.config
    memory.before_update(run, batch, run.actor)
    count = c.actor.updates_per_step
    order = list(range(len(batch.samples)))
    size = -(-len(order) // count)
    sums: list[Tensor] = []
    for k in range(0, len(order), size):
        reports, grad_norm, lr = _update_once(run, batch, order[k:k + size])
        sums.append(torch.stack([r.double() for r in reports]))
        if k == 0:
            _report_first(batch, sums[0], grad_norm)
            check_on_policy(run, batch, "actor/ratio_max_deviation")
    every = torch.cat(sums)
    tokens = max(every[:, 1].sum().item(), 1.0)
    m = batch.metrics
    m["actor/loss"] = every[:, 0].sum().item() / len(sums)
    m["actor/grad_norm"], m["actor/learning_rate"] = grad_norm, lr
    m.update(run.actor.load())
    m["actor/entropy"] = every[:, 4].sum().item() / tokens
    m["actor/clip_fraction"] = every[:, 5].sum().item() / tokens
    if c.algorithm.kl_coefficient > 0 and c.algorithm.kl_in == "loss":
        m["actor/kl_to_reference"] = every[:, 6].sum().item() / tokens


def _report_first(batch: Batch, first: Tensor, grad_norm: float) -> None:
    """KL to the old policy and ratio at the first update: 0 and 1 in exact arithmetic."""
    batch.metrics["actor/kl_to_old"] = first[:, 2].sum().item() / max(first[:, 1].sum().item(), 1.0)
    batch.metrics["actor/ratio_max_deviation"] = first[:, 3].max().item()
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"step {batch.step}: the gradient norm is {grad_norm}")


def _update_once(run: Run, batch: Batch, chosen: list[int]) -> tuple[list[Tensor], float, float]:
    """One optimizer step. Each sample reports [loss, tokens, sum k3 to old, max |ratio - 1|, sum entropy, sum clipped, sum KL]."""
    a = run.config.algorithm
    device = run.device.torch
    samples = batch.samples
    masks = {i: training_mask(torch.tensor(samples[i].mask), samples[i].finish_reason, a.mask_truncated) for i in chosen}
    counts = loss_counts(list(masks.values()))  # global: every rank holds the whole batch
    weights = {i: loss_weights(mask, counts, a.loss_aggregation, run.config.rollout.max_tokens) for i, mask in masks.items()}
    old = batch.columns.get("old_log_probs")
    reference = batch.columns.get("reference_log_probs") if a.kl_in == "loss" else None

    def loss(i: int, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        mask, weight = masks[i].to(device), weights[i].to(device)
        before = log_probs.detach() if old is None else old[i].to(device)
        per_token, clipped = policy_loss(log_probs, before, batch["advantages"][i].to(device), a.clip_ratio_low, a.clip_ratio_high)
        kl = kl_penalty(log_probs, reference[i].to(device), a.kl_estimator) if reference is not None else torch.zeros_like(log_probs)
        total = (weight * (per_token + a.kl_coefficient * kl - a.entropy_coefficient * entropy)).sum()
        with torch.no_grad():
            delta = (log_probs - before)[mask]
            k3 = torch.expm1(-delta) + delta
            deviation = torch.expm1(delta).abs().max() if delta.numel() else delta.new_zeros(())
            report = torch.stack([total, mask.sum(), k3.sum(), deviation, entropy[mask].sum(), clipped[mask].sum(), kl[mask].sum()])
        return total, report.detach()

    wanted = [masks[i].tolist() if i in masks else [] for i in range(len(samples))]
    return run.actor.update([s.token_ids for s in samples], chosen, run.config.actor.micro_batch_size, run.config.rollout.temperature, loss, wanted,
                            _choices(batch))


@phase("time/sync_s", reads=())
def sync(run: Run, batch: Batch) -> None:
    """Bring the engines to the new weights, as version = step, on all ranks or on none."""
    if run.rollout is not None:
        memory.before_sync(run, batch)
        report = run.rollout.sync(run.actor.training, batch.step)
        batch.metrics.update({"sync/bytes": float(report.bytes), "sync/seconds": report.seconds, "sync/checksum_seconds": report.checksum_seconds})
        memory.after_sync(run, batch)
    else:
        batch.metrics.update({"sync/bytes": 0.0, "sync/seconds": 0.0})
    batch.metrics["weights/version"] = float(batch.step)
