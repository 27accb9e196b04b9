"""Estimators by name: which rows count in a baseline, which tokens are trained on, and what each one asks for."""

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from klimb.algos.advantage import gae, reinforce_pp
from klimb.algos.ops import whiten
from klimb.algos.table import ADVANTAGES, Phase

NAN = math.nan

# Group 0: totals 3, 1 and 8, the last alive but without a trained token. Group 1: totals 4 and 2, and a failure.
# The first column is the prompt.
PHASE = Phase(
    rewards=tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [0.0, 0.0, 8.0], [0.0, 4.0, 0.0], [0.0, 2.0, 0.0], [NAN] * 3]),
    mask=tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0], [0, 1, 0], [0, 1, 1], [0, 0, 0]]).bool(),
    alive=tensor([True, True, True, True, True, False]),
    groups=tensor([0, 0, 0, 1, 1, 1]),
    lengths=tensor([2, 1, 2, 1, 2, 2]),
)
STD = math.sqrt(13) + 1e-6  # of 3, 1, 8: mean 4, squares 1 + 9 + 16
PAIR = math.sqrt(2) + 1e-6  # of 4, 2


@pytest.mark.parametrize(
    ("name", "per_row"),
    [
        ("grpo", [-1 / STD, -3 / STD, 0.0, 1 / PAIR, -1 / PAIR, 0.0]),
        ("rloo", [-1.5, -4.5, 0.0, 2.0, -2.0, 0.0]),
        # baselines (2 x 3 + 1 x 1 + 2 x 8) / 5 = 4.6 and (1 x 4 + 2 x 2) / 3 = 8/3
        ("opo", [-1.6, -3.6, 0.0, 4 / 3, -2 / 3, 0.0]),
        # the best of group 0 is the row that no token is trained of
        ("grpo_passk", [0.0, 0.0, 0.0, 2 / PAIR, 0.0, 0.0]),
        ("maxrl", [-1 / 4, -3 / 4, 0.0, 1 / 3, -1 / 3, 0.0]),
    ],
)
def test_a_row_alive_without_a_trained_token_counts_in_the_baseline(name, per_row):
    expected = torch.where(PHASE.mask, tensor(per_row)[:, None], 0.0)
    assert_close(ADVANTAGES[name](PHASE), expected, atol=1e-6, rtol=0)


def test_a_row_alive_without_a_trained_token_counts_in_the_baseline_before_whitening():
    # tokens -1 -1 | -3 | 1 | -1 -1: mean -1, squares 0 0 4 4 0 0, variance 8/5
    unit = 2.0 / math.sqrt(8 / 5)
    expected = [[0.0] * 3, [0.0, -unit, 0.0], [0.0] * 3, [0.0, unit, 0.0], [0.0] * 3, [0.0] * 3]
    raw = ADVANTAGES["reinforce_pp_baseline"](PHASE)
    assert_close(whiten(raw, PHASE.mask), tensor(expected), atol=1e-6, rtol=0)
    assert raw[1, 1] == -3.0, "the training layer whitens"


def test_grpo_may_keep_the_spread():
    expected = torch.where(PHASE.mask, tensor([-1.0, -3.0, 0.0, 1.0, -1.0, 0.0])[:, None], 0.0)
    assert_close(ADVANTAGES["grpo"](replace(PHASE, norm_by_std=False)), expected)


def test_totals_are_the_rewards_of_all_tokens_trained_on_or_not():
    assert PHASE.totals[:-1].tolist() == [3.0, 1.0, 8.0, 4.0, 2.0]


def test_rewards_to_go():
    phase = replace(PHASE, gamma=0.5)
    expected = [[0.0, 2.0, 2.0], [0.0, 1.0, 0.0], [0.0] * 3, [0.0, 4.0, 0.0], [0.0, 2.0, 0.0], [0.0] * 3]
    assert ADVANTAGES["reinforce_pp"](phase).tolist() == expected
    assert torch.equal(ADVANTAGES["reinforce_pp"](phase), reinforce_pp(phase.rewards, phase.mask, 0.5))


def test_remax_takes_the_greedy_total_off():
    phase = replace(PHASE, greedy_totals=tensor([1.0, 1.0, 1.0, 5.0, 5.0, NAN]))
    expected = [[0.0, 2.0, 1.0], [0.0, 0.0, 0.0], [0.0] * 3, [0.0, -1.0, 0.0], [0.0, -3.0, -5.0], [0.0] * 3]
    assert ADVANTAGES["remax"](phase).tolist() == expected


def test_gae_reads_values_discounts_and_what_follows_a_cut():
    last = tensor([0.0, 0.5, 0.0, 0.0, 0.25, 0.0])
    phase = replace(PHASE, values=torch.full((6, 3), 0.5), last_values=last, gamma=0.9, lam=0.8)
    got = ADVANTAGES["gae"](phase)
    assert torch.equal(got, gae(phase.rewards, phase.values, phase.mask, 0.9, 0.8, last)[0])
    # 1 + 0.9 x 0.5 - 0.5 = 0.95, and 0.72 x 1.5 more from the token behind it; 1 + 0.45 - 0.5
    assert_close(got[:2], tensor([[0.0, 2.03, 1.5], [0.0, 0.95, 0.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "message"), [("gae", "critic"), ("remax", "greedy")])
def test_what_an_estimator_asks_for_must_be_there(name, message):
    with pytest.raises(AssertionError, match=message):
        ADVANTAGES[name](PHASE)
