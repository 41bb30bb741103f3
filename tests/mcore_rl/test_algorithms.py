"""Advantages, losses and weights against independent references, and under every split of a batch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import group_advantages, groups_without_signal, kl_penalty, loss_counts, loss_weights, policy_loss, training_mask


def test_groups_without_signal_give_exactly_zero() -> None:
    groups = {"a": [1.0], "b": [0.7] * 8, "c": [0.1] * 7, "d": [0.0, 0.0], "e": [1.0, 0.0], "f": [-1.5]}
    rewards = torch.tensor([r for v in groups.values() for r in v])
    ids = [i for i, v in enumerate(groups.values()) for _ in v]
    result = group_advantages(rewards, ids)
    assert result[-3:-1].tolist() == pytest.approx([0.707106, -0.707106], abs=1e-6)
    assert all(v == 0.0 for v in result[:-3].tolist() + result[-1:].tolist())
    assert groups_without_signal(rewards, ids) == 5


def test_interleaved_uneven_groups() -> None:
    rewards, groups = torch.tensor([2.0, 1, 5, 0, 4, 1]), [2, 0, 1, 0, 2, 0]
    assert group_advantages(rewards, groups, "none").tolist() == pytest.approx([-1, 1 / 3, 0, -2 / 3, 1, 1 / 3], abs=1e-6)
    assert group_advantages(rewards, groups).tolist() == pytest.approx([-0.707106, 0.577349, 0, -1.154699, 0.707106, 0.577349], abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), min_size=1, max_size=24), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter_by_a_single_bit(pairs: list[tuple[float, int]], rng: random.Random) -> None:
    order = list(range(len(pairs)))
    rng.shuffle(order)
    straight = group_advantages(torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs]))
    shuffled = group_advantages(torch.tensor([pairs[i][0] for i in order]), torch.tensor([pairs[i][1] for i in order]))
    assert torch.equal(straight[order], shuffled) and torch.isfinite(straight).all()


def test_bad_advantage_input_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, math.nan]), [0, 0])
    with pytest.raises(ValueError, match="group ids"):
        group_advantages(torch.tensor([1.0]), [0, 0])
    with pytest.raises(ValueError, match="allowed: std, none"):
        group_advantages(torch.tensor([1.0]), [0], "mean")


def test_policy_loss_is_the_clipped_surrogate() -> None:
    ratios, advantages = [0.5, 0.5, 1.0, 1.5, 1.5, 1.1], [1.0, -1.0, 2.0, 1.0, -1.0, 1.0]
    new = torch.tensor(ratios).log().requires_grad_()
    loss, clipped = policy_loss(new, torch.zeros(6), torch.tensor(advantages), 0.2, 0.28)
    expected = [-min(r * a, min(max(r, 0.8), 1.28) * a) for r, a in zip(ratios, advantages, strict=True)]
    assert loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert clipped.tolist() == [False, True, False, True, False, False]
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([-0.5, 0, -2.0, 0, 1.5, -1.1], abs=1e-6)


def test_policy_loss_is_finite_for_any_log_probs() -> None:
    new = torch.tensor([-0.1, -200.0, -1000.0, 0.0], requires_grad=True)
    loss, _ = policy_loss(new, torch.tensor([-1000.0, -0.1, 0.0, -200.0]), torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(new.grad).all()


def test_kl_estimators_at_points() -> None:
    values = {e: kl_penalty(torch.tensor([-1.0, -3.0]), torch.tensor([-1.2, -3.0]), e).tolist() for e in ("k1", "k2", "k3")}
    for estimator, expected in {"k1": 0.2, "k2": 0.02, "k3": 0.0187308}.items():
        assert values[estimator] == pytest.approx([expected, 0.0], abs=1e-6)
    new = torch.tensor([-1.0, -200.0, -0.1, -3.0], requires_grad=True)
    ref = torch.tensor([-1.2, -0.1, -200.0, -3.0])
    capped = kl_penalty(new, ref, "k3", cap=10.0)
    capped.sum().backward()
    assert capped.tolist() == pytest.approx([0.0187308, 10.0, 10.0, 0.0], abs=1e-5)
    assert torch.isfinite(new.grad).all()
    assert new.grad[0].item() == pytest.approx(0.1812692, abs=1e-6) and new.grad[3] == 0
    assert kl_penalty(new, ref, "k3", cap=None)[2].item() == pytest.approx(198.9, abs=1e-3)
    assert kl_penalty(new.bfloat16(), ref.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_penalty(new, ref, "k4")


def test_kl_estimators_approach_the_true_kl() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(12).log_softmax(0), torch.randn(12).mul(0.3).log_softmax(0)
    tokens = torch.multinomial(p.exp(), 200_000, replacement=True)
    truth = (p.exp() * (p - q)).sum().item()
    for estimator in ("k1", "k3"):
        assert kl_penalty(p[tokens], q[tokens], estimator, cap=None).mean().item() == pytest.approx(truth, rel=0.03)
    assert (kl_penalty(p[tokens], q[tokens], "k3") >= 0).all()


LENGTHS, LOSSES = [2, 6, 1, 3], [1.0, 3.0, 5.0, -4.0]
SPLITS = [[[[0, 1, 2, 3]]], [[[0, 1], [2, 3]]], [[[0], [1], [2], [3]]], [[[0, 1], [2], [3]]], [[[0, 1]], [[2, 3]]],
          [[[0], [1]], [[2], [3]]], [[[0, 1, 2]], [[3]]]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("aggregation", "value"), [("token-mean", 1.083333), ("sequence-mean", 1.25), ("fixed-length", 0.40625)])
def test_loss_and_gradient_do_not_depend_on_the_split(split: list[list[list[int]]], aggregation: str, value: float) -> None:
    masks = [torch.tensor([0, 0] + [1] * n + [0]) for n in LENGTHS]  # prompt, response, padding: only the response counts
    counts = sum((loss_counts([masks[i] for micro in rank for i in micro]) for rank in split), torch.zeros(2, dtype=torch.int64))
    parameter = torch.ones((), requires_grad=True)
    total = 0.0
    for rank in split:
        for micro in rank:
            loss = sum((loss_weights(masks[i], counts, aggregation, 8) * (parameter * LOSSES[i])).sum() for i in micro)
            loss.backward()
            total += loss.item()
    assert total == pytest.approx(value, abs=1e-6) and parameter.grad.item() == pytest.approx(value, abs=1e-6)


def test_truncated_samples_leave_the_loss_and_its_counts() -> None:
    rows = [(4, "stop", 1.0), (4, "length", 7.0)]

    def step(rows: list[tuple[int, str, float]], mask_truncated: bool, aggregation: str = "token-mean") -> float:
        masks = [training_mask(torch.ones(n), finish, mask_truncated) for n, finish, _ in rows]
        counts = loss_counts(masks)
        return sum((loss_weights(m, counts, aggregation, 4) * r[2]).sum().item() for m, r in zip(masks, rows, strict=True))

    assert step(rows, True) == pytest.approx(1.0) and step(rows, False) == pytest.approx(4.0)
    assert step(rows, True, "sequence-mean") == pytest.approx(1.0) and step(rows, True, "fixed-length") == pytest.approx(1.0)
    assert step([(4, "length", 7.0)], True) == 0.0
    assert step([(0, "stop", 7.0), (1, "stop", 2.0)], False, "sequence-mean") == pytest.approx(2.0)  # an empty response adds nothing


def test_multi_turn_masks_weigh_only_the_policys_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1])
    assert loss_weights(mask, loss_counts([mask]), "token-mean").tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 0, 1 / 3])
    with pytest.raises(ValueError, match="allowed"):
        loss_weights(mask, loss_counts([mask]), "mean")
