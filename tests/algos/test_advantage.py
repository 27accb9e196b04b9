"""Token rewards and advantages; the numbers of cases RP-01, GV-01, GV-02, GA-01, GA-02 and RF-01."""

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from klimb.algos.advantage import gae, grpo, rloo, token_rewards

NAN = math.nan


def test_case_RP_01_the_score_is_on_the_last_masked_in_token():
    mask = tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    rewards = token_rewards(tensor([2.0, -1.0, 0.5]), mask)
    assert rewards.tolist() == [[0, 0, 2.0, 0, 0], [0, 0, 0, 0, -1.0], [0.5, 0, 0, 0, 0]]
    assert torch.where(mask, rewards, 0).sum(1).tolist() == [2.0, -1.0, 0.5]


def test_token_rewards_with_a_prompt_a_gap_and_a_failed_row():
    mask = tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    kl = tensor([[77.0, 0.5, NAN, -0.25, NAN], [NAN] * 5])
    rewards = token_rewards(tensor([3.0, NAN]), mask, kl, 2.0)
    assert rewards.tolist() == [[0.0, -1.0, 0.0, 3.5, 0.0], [0.0] * 5]


def test_case_GV_01_a_value_at_a_pad_is_never_the_next_value():
    for junk in (77.0, NAN):
        mask = tensor([[True, True, False]])
        advantages, returns = gae(tensor([[0.0, 1.0, junk]]), tensor([[0.5, 0.2, junk]]), mask, gamma=1.0, lam=0.95)
        assert_close(advantages, tensor([[0.46, 0.8, 0.0]]), atol=1e-6, rtol=0)
        assert_close(returns, tensor([[0.96, 1.0, 0.0]]), atol=1e-6, rtol=0)


def test_case_GV_01_advantages_come_from_returns():
    rewards, values = tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=1.0)
    assert_close(advantages, tensor([[0.5, 0.5, 0.5]]), atol=1e-6, rtol=0)
    assert_close(returns, tensor([[1.0, 1.0, 1.0]]), atol=1e-6, rtol=0)


def test_case_GV_02_only_a_cut_off_row_is_bootstrapped():
    # three rows: ended; cut off with bootstrap off; cut off with bootstrap on
    rewards = tensor([[0.0, 0.0, 1.0]]).expand(3, 3)
    values = tensor([[0.4, 0.6, 0.8]]).expand(3, 3)
    mask = torch.ones(3, 3, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, 0.99, 0.95, last_values=tensor([0.0, 0.0, 0.9]))
    off, on = [0.55148405, 0.3801, 0.2], [1.33960941275, 1.2180855, 1.091]
    assert_close(advantages, tensor([off, off, on]), atol=1e-6, rtol=0)
    off, on = [0.95148405, 0.9801, 1.0], [1.73960941275, 1.8180855, 1.891]
    assert_close(returns, tensor([off, off, on]), atol=1e-6, rtol=0)
    without, _ = gae(rewards, values, mask, 0.99, 0.95)
    assert torch.equal(without[0], advantages[0])


def test_gae_steps_over_a_gap_as_if_it_were_not_there():
    rewards, values = tensor([[0.0, 1.0, 2.0]]), tensor([[0.3, 0.1, 0.7]])
    whole = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.9, 0.8, tensor([0.4]))
    mask = tensor([[False, True, False, False, True, True, False]])
    spread = [torch.full((1, 7), NAN).masked_scatter(mask, x) for x in (rewards, values)]
    gapped = gae(*spread, mask, 0.9, 0.8, tensor([0.4]))
    for got, expected in zip(gapped, whole, strict=True):
        assert torch.equal(got[mask], expected[0])
        assert torch.count_nonzero(got[~mask]) == 0


def test_gae_of_a_row_without_a_token_is_zero():
    advantages, returns = gae(
        tensor([[NAN, NAN]]), tensor([[NAN, NAN]]), tensor([[False, False]]), 1.0, 1.0, tensor([NAN])
    )
    assert advantages.tolist() == returns.tolist() == [[0.0, 0.0]]


GA_01_REWARDS = tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 10.0, 20.0, 30.0, 40.0])
GA_01_GROUPS = tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])


def test_case_GA_01_normalised_within_the_group_by_the_sample_std():
    a, b = 0.8660254037844, (1.161895003862, 0.3872983346207)
    expected = tensor([0.0, 0.0, 0.0, 0.0, -a, a, a, -a, -b[0], -b[1], b[1], b[0]])
    advantages = grpo(GA_01_REWARDS, GA_01_GROUPS)
    assert_close(advantages, expected, atol=1e-5, rtol=0)
    assert advantages[:4].tolist() == [0.0] * 4
    without_spread = [not advantages[g == GA_01_GROUPS].any() for g in range(3)]
    assert sum(without_spread) / 3 == pytest.approx(0.3333333333333)


def test_case_GA_02_groups_are_formed_by_row_id():
    rewards, groups = tensor([1.0, 1.0, 0.0, 1.0]), tensor([0, 0, 1, 1])
    assert grpo(rewards, groups, norm_by_std=False).tolist() == [0.0, 0.0, -0.5, 0.5]


def test_case_RF_01_an_abstention_and_a_failure():
    groups = tensor([7, 7, 7, 7])
    part_a = grpo(tensor([1.5, 0.5, 0.5, 1.5]), groups, norm_by_std=False)
    assert_close(part_a, tensor([0.5, -0.5, -0.5, 0.5]), atol=1e-6, rtol=0)
    valid = tensor([True, True, False, True])
    for failed in (NAN, 0.0, 99.0):
        part_b_and_c = grpo(tensor([1.0, 0.0, failed, 1.0]), groups, norm_by_std=False, valid=valid)
        assert_close(part_b_and_c, tensor([1 / 3, -2 / 3, 0.0, 1 / 3]), atol=1e-6, rtol=0)


def test_rloo_in_numbers():
    rewards, groups = tensor([1.0, 4.0, 7.0, 2.0, 0.0]), tensor([3, -5, 3, 3, -5])
    # others of 1: (7 + 2) / 2, of 7: (1 + 2) / 2, of 2: (1 + 7) / 2; of 4: 0, of 0: 4
    assert_close(rloo(rewards, groups), tensor([-3.5, 4.0, 5.5, -2.0, -4.0]), atol=1e-6, rtol=0)


def test_grpo_is_computed_by_group_in_any_order_and_with_any_ids():
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ids = tensor([2**60, -3, 0])[GA_01_GROUPS]
    assert_close(grpo(GA_01_REWARDS[order], ids[order]), grpo(GA_01_REWARDS, GA_01_GROUPS)[order])


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_groups_without_spread_or_company_get_exactly_zero(estimator):
    # the float32 mean of seven times 12.34 is not 12.34; group 5 shrank to one row by a failure
    rewards = tensor([12.34] * 7 + [8.0, 3.0, NAN])
    groups = tensor([1] * 7 + [4, 5, 5])
    valid = tensor([True] * 9 + [False])
    assert estimator(rewards, groups, valid=valid).tolist() == [0.0] * 10


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_all_failed_and_no_rows_at_all(estimator):
    rewards, groups = tensor([NAN, NAN]), tensor([1, 1])
    assert estimator(rewards, groups, valid=tensor([False, False])).tolist() == [0.0, 0.0]
    assert estimator(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_advantages_are_float32_and_carry_no_gradient(dtype):
    x = tensor([[1.0, 2.0], [3.0, 5.0]], dtype=dtype, requires_grad=True)
    mask, groups = torch.ones(2, 2, dtype=torch.bool), tensor([0, 0])
    results = [
        token_rewards(x[:, 0], mask, x, 0.5),
        *gae(x, x, mask, 0.9, 0.9, x[:, 0]),
        grpo(x[:, 0], groups),
        rloo(x[:, 0], groups),
    ]
    for result in results:
        assert result.dtype == torch.float32
        assert not result.requires_grad
