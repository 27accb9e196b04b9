"""What must hold of every estimator with a group baseline, whatever the rewards, ids, sizes and failures."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from klimb.algos.advantage import grpo, grpo_passk, maxrl, opo, reinforce_pp_baseline, rloo
from klimb.algos.groups import Groups
from klimb.algos.loss import POLICY_LOSSES, policy_loss
from tests.algos.batches import HIGHEST_ID, LOWEST_ID, often, seeds

WIDTH = 6
for_each = settings(often, max_examples=20)


def token_mask(lengths: Tensor) -> Tensor:
    return torch.arange(WIDTH) < lengths[:, None]


# rewards, groups, lengths, valid -> [B], or [B, T] for the last
ESTIMATORS = {
    "grpo": lambda r, g, n, v: grpo(r, g, valid=v),
    "dr_grpo": lambda r, g, n, v: grpo(r, g, norm_by_std=False, valid=v),
    "rloo": lambda r, g, n, v: rloo(r, g, v),
    "opo": lambda r, g, n, v: opo(r, n, g, v),
    "grpo_passk": lambda r, g, n, v: grpo_passk(r, g, v),
    "maxrl": lambda r, g, n, v: maxrl(r, g, v),
    "reinforce_pp_baseline": lambda r, g, n, v: reinforce_pp_baseline(r, g, token_mask(n) & v[:, None], v),
}
UNWHITENED = [name for name in ESTIMATORS if name != "reinforce_pp_baseline"]
every = pytest.mark.parametrize("name", ESTIMATORS)

ids = st.integers(LOWEST_ID, HIGHEST_ID)
any_reward = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def grouped(draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, group ids in any order, lengths, valid rows (an invalid one holds NaN)."""
    n = draw(st.integers(1, 12))
    some = draw(st.lists(ids, min_size=1, max_size=4))
    groups = draw(st.lists(st.sampled_from(some), min_size=n, max_size=n))
    rewards = draw(st.lists(st.floats(-10, 10, width=32), min_size=n, max_size=n))
    lengths = draw(st.lists(st.integers(1, WIDTH), min_size=n, max_size=n))
    valid = torch.tensor(draw(st.lists(st.sampled_from([True, True, True, False]), min_size=n, max_size=n)))
    return torch.where(valid, torch.tensor(rewards), math.nan), torch.tensor(groups), torch.tensor(lengths), valid


@every
@for_each
@given(grouped(), any_reward)
def test_equal_rewards_in_every_group_give_exactly_zero(name, rows, reward):
    _, groups, lengths, valid = rows
    rewards = torch.where(valid, reward, math.nan)
    assert torch.count_nonzero(ESTIMATORS[name](rewards, groups, lengths, valid)) == 0


@pytest.mark.parametrize("name", UNWHITENED)
@for_each
@given(grouped(), any_reward, st.integers(1, 40), st.sampled_from(list(POLICY_LOSSES)), seeds)
def test_a_group_with_equal_rewards_gives_exactly_no_gradient_beside_others(name, rows, reward, size, loss_name, seed):
    rewards, groups, lengths, valid = rows
    new_id = next(i for i in range(5) if i not in groups.tolist())
    rewards = torch.cat([rewards, torch.full((size,), reward)])
    groups = torch.cat([groups, torch.full((size,), new_id)])
    lengths = torch.cat([lengths, torch.arange(size) % WIDTH + 1])
    valid = torch.cat([valid, torch.ones(size, dtype=torch.bool)])
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(len(groups), WIDTH, generator=g)
    new = (old + torch.randn(len(groups), WIDTH, generator=g)).requires_grad_()
    mask = token_mask(lengths) & valid[:, None]
    advantages = ESTIMATORS[name](rewards, groups, lengths, valid)
    loss, _ = policy_loss(loss_name, new, old, advantages[:, None].expand(mask.shape), mask)
    loss.sum().backward()
    assert new.grad is not None
    assert torch.count_nonzero(new.grad[-size:]) == 0
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "maxrl"])
@for_each
@given(grouped(), st.integers(-64, 64))
def test_a_constant_added_to_every_reward_changes_nothing(name, rows, shift):
    rewards, groups, lengths, valid = rows
    rewards = (rewards * 64).round() / 64  # so that the shifted rewards are exact in float32
    before, after = (ESTIMATORS[name](r, groups, lengths, valid) for r in (rewards, rewards + shift))
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", UNWHITENED)
@for_each
@given(grouped(), st.randoms(use_true_random=False))
def test_reordered_rows_give_the_reordered_advantages_exactly(name, rows, rng):
    rewards, groups, lengths, valid = rows
    order = torch.tensor(rng.sample(range(len(groups)), len(groups)))
    straight = ESTIMATORS[name](*rows)
    assert torch.equal(ESTIMATORS[name](rewards[order], groups[order], lengths[order], valid[order]), straight[order])


@pytest.mark.parametrize("name", UNWHITENED)
@pytest.mark.parametrize("size", [3, 16, 64, 257])
def test_the_order_within_a_large_group_changes_no_bit(name, size):
    g = torch.Generator().manual_seed(size)
    rewards, lengths = torch.randn(size, generator=g), torch.randint(1, 100, (size,), generator=g)
    groups, valid = torch.zeros(size, dtype=torch.int64), torch.rand(size, generator=g) < 0.9
    straight = ESTIMATORS[name](rewards, groups, lengths, valid)
    for _ in range(5):
        order = torch.randperm(size, generator=g)
        got = ESTIMATORS[name](rewards[order], groups[order], lengths[order], valid[order])
        assert torch.equal(got, straight[order])


@often
@given(grouped(), st.randoms(use_true_random=False))
def test_whitened_advantages_follow_their_rows(rows, rng):
    rewards, groups, lengths, valid = rows
    rewards = (rewards * 4).round() / 4  # a spread of rounding errors is not a spread
    order = torch.tensor(rng.sample(range(len(groups)), len(groups)))
    whitened = ESTIMATORS["reinforce_pp_baseline"]
    got = whitened(rewards[order], groups[order], lengths[order], valid[order])
    assert_close(got, whitened(rewards, groups, lengths, valid)[order], atol=1e-5, rtol=1e-5)


@every
@for_each
@given(grouped(), ids)
def test_only_which_rows_share_an_id_matters(name, rows, offset):
    rewards, groups, lengths, valid = rows
    moved = groups + offset  # wraps around: still one id for one
    got, expected = (ESTIMATORS[name](rewards, g, lengths, valid) for g in (moved, groups))
    assert_close(got, expected, atol=1e-5, rtol=1e-5)


@every
@for_each
@given(grouped(), st.sampled_from([math.nan, math.inf, -math.inf, 99.0]))
def test_a_failed_row_gets_nothing_and_is_in_no_baseline(name, rows, failed):
    rewards, groups, lengths, valid = rows
    got = ESTIMATORS[name](torch.where(valid, rewards, failed), groups, lengths, valid)
    assert torch.count_nonzero(got[~valid]) == 0
    without = ESTIMATORS[name](rewards[valid], groups[valid], lengths[valid], valid[valid])
    assert_close(got[valid], without, atol=1e-5, rtol=1e-5)


@every
def test_a_group_of_one_and_one_that_failures_left_alone_get_zero(name):
    rewards, groups = torch.tensor([8.0, 3.0, math.nan, math.nan]), torch.tensor([4, 5, 5, 6])
    valid = torch.tensor([True, True, False, False])
    got = ESTIMATORS[name](rewards, groups, torch.tensor([2, 3, 1, 4]), valid)
    assert torch.count_nonzero(got) == 0


@every
def test_no_rows_at_all(name):
    none = torch.zeros(0, dtype=torch.int64)
    assert ESTIMATORS[name](torch.zeros(0), none, none, none.bool()).numel() == 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@for_each
@given(grouped())
def test_the_advantages_of_a_group_sum_to_zero(name, rows):
    _, groups, _, _ = rows
    advantages = ESTIMATORS[name](*rows)
    for g in groups.unique():
        assert advantages[groups == g].sum().item() == pytest.approx(0.0, abs=1e-4)


@often
@given(grouped())
def test_optimal_advantages_sum_to_zero_when_every_row_counts_its_length(rows):
    _, groups, lengths, _ = rows
    weighted = lengths * ESTIMATORS["opo"](*rows)
    for g in groups.unique():
        assert weighted[groups == g].sum().item() == pytest.approx(0.0, abs=1e-4)


@for_each
@given(grouped())
def test_a_group_has_spread_when_two_of_its_present_rewards_differ(rows):
    rewards, groups, _, valid = rows
    found = Groups(groups, valid)
    spread = found.rows(found.has_spread(rewards).expand(found.present.shape))
    for row in range(len(rewards)):
        mates = {float(r) for r in rewards[(groups == groups[row]) & valid]}
        assert bool(spread[row]) == (len(mates) > 1)
