"""The other estimators, in numbers that a reader can follow by hand."""

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from klimb.algos.advantage import (
    grpo_passk,
    maxrl,
    opo,
    overlong_penalty,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
)

NAN = math.nan
ONE_GROUP = tensor([3, 3, 3, 3])


def close(got: Tensor, expected: list) -> None:
    assert_close(got, tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),  # mean 1/4
        ([1.0, 1.0, 0.0, 0.0], [1.0, 1.0, -1.0, -1.0]),  # mean 1/2
        ([1.0, 1.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3, -1.0]),  # mean 3/4
        ([0.0, 0.0, 0.0, 0.0], [0.0] * 4),
        ([1.0, 1.0, 1.0, 1.0], [0.0] * 4),
        ([2.0, -2.0, 1.0, -1.0], [0.0] * 4),  # a spread, but mean 0
        ([-3.0, -1.0, -1.0, -3.0], [0.5, -0.5, -0.5, 0.5]),  # mean -2 turns the signs round
    ],
)
def test_maxrl(rewards, expected):
    close(maxrl(tensor(rewards), ONE_GROUP), expected)


def test_maxrl_counts_a_rare_success_for_more_in_each_group_by_itself():
    rewards, groups = tensor([1.0, 1.0, 0.0, 1.0, 0.0, NAN]), tensor([0, 9, 0, 9, 9, 9])
    valid = tensor([True, True, True, True, True, False])
    close(maxrl(rewards, groups, valid), [1.0, 0.5, -1.0, 0.5, -1.0, 0.0])


@pytest.mark.parametrize(
    ("rewards", "lengths", "expected"),
    [
        # baseline (10 x 1 + 30 x 0) / 40 = 1/4
        ([1.0, 0.0], [10, 30], [0.75, -0.25]),
        ([1.0, 0.0], [30, 10], [0.25, -0.75]),
        # equal lengths: the plain mean, 7/2
        ([2.0, 5.0], [8, 8], [-1.5, 1.5]),
        # (1 x 4 + 2 x 1 + 5 x 2) / 8 = 2
        ([4.0, 1.0, 2.0], [1, 2, 5], [2.0, -1.0, 0.0]),
        ([4.0, 4.0, 4.0], [1, 2, 5], [0.0, 0.0, 0.0]),
    ],
)
def test_opo(rewards, lengths, expected):
    close(opo(tensor(rewards), tensor(lengths), torch.zeros(len(rewards), dtype=torch.int64)), expected)


def test_opo_leaves_the_length_of_a_failed_row_out():
    rewards, lengths, groups = tensor([1.0, NAN, 0.0, 6.0]), tensor([10, 1000, 30, 7]), tensor([2, 2, 2, -2])
    close(opo(rewards, lengths, groups, tensor([True, False, True, True])), [0.75, 0.0, -0.25, 0.0])


def test_opo_without_a_single_token_falls_back_to_the_lowest_reward():
    close(opo(tensor([1.0, 3.0]), tensor([0, 0]), tensor([0, 0])), [0.0, 2.0])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, std sqrt(14 / 3)
        ([2.0, 6.0, 1.0, 3.0], [0.0, 3.0 / (math.sqrt(14 / 3) + 1e-6), 0.0, 0.0]),
        # one success in four: std 1/2
        ([0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0 / (0.5 + 1e-6), 0.0]),
        # two equal best
        ([1.0, 1.0, 0.0, 0.0], [0.0] * 4),
        ([5.0, 5.0, 5.0, 5.0], [0.0] * 4),
    ],
)
def test_grpo_passk(rewards, expected):
    close(grpo_passk(tensor(rewards), ONE_GROUP), expected)


def test_grpo_passk_never_lets_a_failed_row_be_best_or_second():
    rewards, groups = tensor([NAN, 2.0, -4.0, -1.0, -3.0, NAN]), tensor([1, 1, 0, 0, 0, 0])
    valid = tensor([False, True, True, True, True, False])
    # group 0: best -1, second -3, mean -8/3, squares 16/9 + 25/9 + 1/9 = 14/3, std sqrt(7/3)
    close(grpo_passk(rewards, groups, valid), [0.0, 0.0, 0.0, 2.0 / (math.sqrt(7 / 3) + 1e-6), 0.0, 0.0])


def test_reinforce_pp():
    mask = tensor([[True, True, True, False], [False, True, False, True]])
    rewards = tensor([[1.0, 0.0, 4.0, NAN], [77.0, 2.0, NAN, 8.0]])
    # 1 + 0/2 + 4/4; a gap costs no discount: 2 + 8/2
    assert reinforce_pp(rewards, mask, 0.5).tolist() == [[2.0, 2.0, 4.0, 0.0], [0.0, 6.0, 0.0, 8.0]]
    assert reinforce_pp(rewards, mask, 1.0).tolist() == [[5.0, 4.0, 4.0, 0.0], [0.0, 10.0, 0.0, 8.0]]
    assert reinforce_pp(rewards, mask, 0.0).tolist() == [[1.0, 0.0, 4.0, 0.0], [0.0, 2.0, 0.0, 8.0]]


def test_remax():
    mask = tensor([[True, True, True], [True, True, False], [False, False, False]])
    rewards = tensor([[-0.5, 0.0, 2.0], [0.0, 1.0, NAN], [NAN, NAN, NAN]])
    # to go: 1.5 2 2, less 0.5; 1 1, less 3; the last row failed, and so may its greedy answer have
    assert remax(rewards, tensor([0.5, 3.0, NAN]), mask).tolist() == [[1.0, 1.5, 1.5], [-2.0, -2.0, 0.0], [0.0] * 3]


def test_reinforce_pp_baseline():
    # above the mean: 1, -1 | 0. Tokens 1 1 1 -1 | 0 0: mean 1/3, squares 3 x 4/9 + 16/9 + 2/9 = 10/3, variance 2/3
    mask = tensor([[True, True, True], [True, False, False], [True, True, False]])
    got = reinforce_pp_baseline(tensor([3.0, 1.0, 5.0]), tensor([4, 4, 6]), mask)
    unit = 1.0 / math.sqrt(2 / 3)
    a, b, c = 2 / 3 * unit, -4 / 3 * unit, -1 / 3 * unit
    close(got, [[a, a, a], [b, 0.0, 0.0], [c, c, 0.0]])


def test_reinforce_pp_baseline_counts_rows_with_a_token_unless_told():
    mask, groups = tensor([[True, True], [True, True], [False, False]]), tensor([1, 1, 1])
    unit = math.sqrt(3) / 2  # of 1 1 -1 -1 the variance is 4/3
    close(reinforce_pp_baseline(tensor([3.0, 1.0, NAN]), groups, mask), [[unit] * 2, [-unit] * 2, [0.0] * 2])
    # the third row's reward of 8 moves the mean to 4: -1 -1 -3 -3
    told = reinforce_pp_baseline(tensor([3.0, 1.0, 8.0]), groups, mask, tensor([True, True, True]))
    close(told, [[unit] * 2, [-unit] * 2, [0.0] * 2])
    # the rows differ from a group mean of their own, so what the third adds is seen where another group stands by
    mask = tensor([[True], [True], [False], [True], [True]])
    groups, rewards = tensor([1, 1, 1, 2, 2]), tensor([3.0, 1.0, 8.0, 1.0, 3.0])
    every = tensor([True] * 5)
    # -1 -3 . -1 1: mean -1, squares 0 4 0 4, variance 8/3
    unit = 2.0 / math.sqrt(8 / 3)
    close(reinforce_pp_baseline(rewards, groups, mask, every), [[0.0], [-unit], [0.0], [0.0], [unit]])


def test_overlong_penalty():
    lengths = tensor([1, 10, 12, 15, 19, 20])
    cut_off = tensor([False, False, False, False, False, True])
    assert overlong_penalty(lengths, cut_off, 0.5, 20).tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 0.5]
    # from 10 tokens on, a twentieth of a point each
    close(overlong_penalty(lengths, cut_off, 0.5, 20, 10), [0.0, 0.0, 0.1, 0.25, 0.45, 0.5])
    # a response that ended by itself at the limit is as long as one cut off there
    assert overlong_penalty(tensor([20]), tensor([False]), 0.5, 20, 10).tolist() == [0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_are_float32_and_carry_no_gradient(dtype):
    x = tensor([[1.0, 2.0], [3.0, 5.0]], dtype=dtype, requires_grad=True)
    mask, groups = torch.ones(2, 2, dtype=torch.bool), tensor([0, 0])
    results = [
        reinforce_pp(x, mask, 0.9),
        remax(x, x[:, 0], mask),
        reinforce_pp_baseline(x[:, 0], groups, mask),
        opo(x[:, 0], tensor([1, 2]), groups),
        grpo_passk(x[:, 0], groups),
        maxrl(x[:, 0], groups),
        grpo_passk(x[:1, 0], groups[:1]),
    ]
    for result in results:
        assert result.dtype == torch.float32
        assert not result.requires_grad
