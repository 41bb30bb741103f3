"""GAE, whitening, the value loss and token rewards against independent references; cases C07 and C11 of ../shared/cases."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.ppo import explained_variance, gae, token_rewards, value_loss, whiten
from parallel.config import ParallelConfig
from parallel.micro_batch import make_micro_batches


def reference_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 as the sum that it is: advantage of t = sum over k of (gamma lam)^k delta(t + k)."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.booleans()), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors_over_the_policys_tokens(steps: list[tuple[float, float, bool]], gamma: float, lam: float) -> None:
    rewards, values, mask = (torch.tensor(column) for column in zip(*steps, strict=True))
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    want = reference_gae([r for r, _, m in steps if m], [v for _, v, m in steps if m], gamma, lam)
    assert advantages[mask].tolist() == pytest.approx(want, abs=2e-5)
    assert returns[mask].tolist() == pytest.approx([a + v for a, (_, v, m) in zip(want, [s for s in steps if s[2]], strict=True)], abs=2e-5)
    assert not advantages[~mask].any() and not returns[~mask].any()
    padded = [torch.cat([column, torch.full((3,), fill, dtype=column.dtype)]) for column, fill in ((rewards, 50.0), (values, -70.0), (mask, False))]
    longer = gae(*padded, gamma, lam)
    assert torch.equal(longer[0][:len(steps)], advantages) and torch.equal(longer[1][:len(steps)], returns)


def test_lambda_1_is_the_whole_rest_and_lambda_0_the_next_value() -> None:
    rewards, values, mask = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 0.5, 0.7]), torch.ones(3, dtype=torch.bool)
    assert gae(rewards, values, mask, 1.0, 1.0)[1].tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert gae(rewards, values, mask, 0.5, 1.0)[1].tolist() == pytest.approx([0.25, 0.5, 1.0])
    assert gae(rewards, values, mask, 1.0, 0.0)[0].tolist() == pytest.approx([0.3, 0.2, 0.3], abs=1e-6)


def test_c11_values_of_tokens_that_the_policy_did_not_produce_have_no_influence() -> None:
    mask, values = torch.tensor([1, 1, 0, 0, 1]).bool(), torch.tensor([0.5, 0.25, 9.0, 9.0, 0.75])
    advantages, returns = gae(token_rewards(1.0, mask), values, mask, 1.0, 0.9)
    assert advantages.tolist() == pytest.approx([0.4025, 0.725, 0.0, 0.0, 0.25], abs=1e-6)
    assert returns[mask].tolist() == pytest.approx([0.9025, 0.975, 1.0], abs=1e-6)
    ends_masked = torch.tensor([1, 1, 0]).bool()  # the reward goes to the last token that the policy chose
    assert gae(token_rewards(1.0, ends_masked), torch.tensor([0.0, 0, 100]), ends_masked, 1.0, 0.9)[0].tolist() == pytest.approx([0.9, 1.0, 0.0])


def test_token_rewards_take_the_kl_off_every_chosen_token() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1]).bool()
    rewards = token_rewards(2.0, mask, torch.tensor([5.0, 1.0, -2.0, 7.0, 0.5]), 0.1)
    assert rewards.tolist() == pytest.approx([0.0, -0.1, 0.2, 0.0, 1.95])
    assert token_rewards(2.0, torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_whitening_is_over_all_tokens_of_the_step_in_any_order() -> None:
    columns = [torch.tensor([0.0, 3, 1]), torch.tensor([9.0, -2]), torch.tensor([5.0, 4.0, 0.0, 1.0])]
    masks = [torch.tensor([0, 1, 1]), torch.tensor([0, 1]), torch.tensor([0, 1, 0, 1])]
    got = whiten(columns, masks, 1e-8)
    every = torch.tensor([3.0, 1, -2, 4, 1])
    want = (every - every.mean()) / every.std()
    assert torch.cat([g[m != 0] for g, m in zip(got, masks, strict=True)]).tolist() == pytest.approx(want.tolist(), abs=1e-6)
    assert all(not g[m == 0].any() for g, m in zip(got, masks, strict=True))
    order = [2, 0, 1]
    again = whiten([columns[i] for i in order], [masks[i] for i in order], 1e-8)
    assert all(torch.equal(again[k], got[i]) for k, i in enumerate(order))
    assert not torch.cat(whiten([torch.tensor([0.0, 0.7, 0.7])], [torch.tensor([0, 1, 1])], 1e-8)).any()
    assert not torch.cat(whiten([torch.tensor([0.0, 0.7])], [torch.tensor([0, 1])], 1e-8)).any()


def test_value_loss_is_the_larger_of_the_plain_and_the_clipped_error() -> None:
    chance = random.Random(3)
    rows = [(chance.uniform(-1, 1), chance.uniform(-1, 1), chance.uniform(-1, 1)) for _ in range(200)]
    new, old, returns = (torch.tensor(c) for c in zip(*rows, strict=True))
    new.requires_grad_()
    loss, clipped = value_loss(new, old, returns, 0.2)
    want = [0.5 * max((v - r) ** 2, (min(max(v, o - 0.2), o + 0.2) - r) ** 2) for v, o, r in rows]
    assert loss.tolist() == pytest.approx(want, abs=1e-6) and 0 < clipped.sum() < 200
    loss.sum().backward()
    assert new.grad is not None
    # where the clip decides, the loss does not see the value any more
    assert new.grad.tolist() == pytest.approx([0.0 if c else v - r for (v, _, r), c in zip(rows, clipped.tolist(), strict=True)], abs=1e-6)
    plain, none = value_loss(new, old, returns, None)
    assert plain.tolist() == pytest.approx([0.5 * (v - r) ** 2 for v, _, r in rows], abs=1e-6) and not none.any()
    assert value_loss(new.bfloat16(), old.bfloat16(), returns.bfloat16(), 0.2)[0].dtype == torch.float32


def test_explained_variance() -> None:
    masks, returns = [torch.tensor([0, 1, 1]), torch.tensor([0, 1])], [torch.tensor([9.0, 1, 2]), torch.tensor([9.0, 6])]
    assert explained_variance(returns, returns, masks) == pytest.approx(1.0)
    assert explained_variance([torch.zeros(3), torch.zeros(2)], returns, masks) == pytest.approx(0.0)
    assert explained_variance([torch.tensor([0.0, 2, 1]), torch.tensor([0.0, 4])], returns, masks) == pytest.approx(1 - (14 / 9) / (14 / 3))
    assert explained_variance(returns, [torch.ones(3), torch.ones(2)], masks) == 0.0 and explained_variance([], [], []) == 0.0


@pytest.mark.parametrize(("sequences", "packing", "which"), [
    ([[1, 2, 3, 0]], "packed", 0), ([[1, 2, 3, 0], [5, 6, 7, 8, 9, 4]], "padded", 0), ([[5, 6, 7], [1, 2, 3, 0]], "packed", 1),
    ([[1, 2, 9], [1, 2, 3, 0]], "shared_prompt", 1)])
def test_c07_the_value_of_a_token_is_that_of_the_position_before_it(sequences: list[list[int]], packing: str, which: int) -> None:
    masks = [[False, False] + [True] * (len(s) - 2) for s in sequences]
    micro_batch, = make_micro_batches(sequences, [range(len(sequences))], ParallelConfig(), packing, masks)  # type: ignore[arg-type]
    by_position = 10.0 + micro_batch.positions.flatten()  # the model's value after each token that it read
    values = micro_batch.split(micro_batch.per_token(by_position[micro_batch.rows]))[which]
    assert values.tolist() == [0.0, 11.0, 12.0]  # from the second token on: the prompt's is not wanted, then the response's two
