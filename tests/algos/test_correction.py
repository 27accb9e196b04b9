"""The engine/trainer mismatch, correction weights and rejected rows, in numbers; the mismatch by a plain loop."""

import math
import random

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from klimb.algos.correction import keep_rows, mismatch, weights
from klimb.errors import ConfigError

NAN = math.nan


def test_mismatch_in_numbers():
    # rho = 2 and 1/2 in the first row, 1 in the second; the third has no token
    old = tensor([[NAN, math.log(0.5), math.log(0.2)], [NAN, math.log(0.3), NAN], [NAN, NAN, NAN]])
    sampler = tensor([[NAN, math.log(0.25), math.log(0.4)], [NAN, math.log(0.3), 77.0], [NAN, 77.0, NAN]])
    mask = tensor([[False, True, True], [False, True, False], [False, False, False]])
    mean_rho = 3.5 / 3
    expected = {
        "kl": 0.0,
        "k3": (2.0 - math.log(2.0) - 1.0 + 0.5 + math.log(2.0) - 1.0) / 3,
        "ppl_ratio": 1.0,
        "ess": mean_rho**2 / ((4.0 + 0.25 + 1.0) / 3),
        "probs_diff_mean": (0.25 + 0.2) / 3,
        "probs_diff_max": 0.25,
        "max_log_ratio": math.log(2.0),
    }
    assert mismatch(old, sampler, mask) == pytest.approx(expected, abs=1e-6)


def test_kl_and_ppl_ratio_point_from_sampler_to_old():
    old, sampler = tensor([[-2.0, -3.0], [-1.0, 0.0]]), tensor([[-1.0, -2.5], [-1.5, 0.0]])
    measures = mismatch(old, sampler, tensor([[True, True], [True, False]]))
    assert measures["kl"] == pytest.approx((1.0 + 0.5 - 0.5) / 3, abs=1e-6)
    assert measures["ppl_ratio"] == pytest.approx((math.exp(0.75) + math.exp(-0.5)) / 2, abs=1e-6)
    assert measures["max_log_ratio"] == 1.0


def test_equal_logprobs_have_no_mismatch():
    x = tensor([[-0.1, -7.0, -3.0]])
    measures = mismatch(x, x, torch.ones(1, 3, dtype=torch.bool))
    assert measures.pop("ess") == 1.0
    assert measures.pop("ppl_ratio") == 1.0
    assert set(measures.values()) == {0.0}


@pytest.mark.parametrize("shift", [0.08, 0.24, 0.36, 0.78])
def test_a_constant_ratio_has_an_effective_share_of_at_most_one(shift):
    # rounding alone would make it 1.0000002
    ess = mismatch(torch.full((1, 3), -shift), torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))["ess"]
    assert ess == 1.0


def test_without_a_token_there_is_nothing_to_log():
    assert mismatch(tensor([[NAN]]), tensor([[0.0]]), tensor([[False]])) == {}


def test_extremes_stay_finite():
    old, sampler = tensor([[-200.0, 0.0, -1.0]]), tensor([[0.0, -200.0, -1.0]])
    measures = mismatch(old, sampler, torch.ones(1, 3, dtype=torch.bool))
    assert all(math.isfinite(x) for x in measures.values())
    assert measures["max_log_ratio"] == 200.0
    assert measures["ess"] == pytest.approx(1 / 3, rel=1e-6)
    assert mismatch(old[:, :1], sampler[:, :1], tensor([[True]]))["ppl_ratio"] == pytest.approx(math.exp(20.0))
    assert mismatch(old[:, 1:], sampler[:, 1:], torch.ones(1, 2, dtype=torch.bool))["k3"] == pytest.approx(
        (math.exp(20.0) - 21.0) / 2, rel=1e-6
    )


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_a_plain_loop(seed):
    rng = random.Random(seed)
    rows, width = rng.randint(1, 5), rng.randint(1, 7)
    old = tensor([[-rng.expovariate(1.0) for _ in range(width)] for _ in range(rows)])
    sampler = old + tensor([[rng.gauss(0.0, 0.3) for _ in range(width)] for _ in range(rows)])
    mask = tensor([[rng.random() < 0.6 for _ in range(width)] for _ in range(rows)])
    mask[0, 0] = True
    pairs = [
        [(a, b) for a, b, m in zip(*row, strict=True) if m]
        for row in zip(old.tolist(), sampler.tolist(), mask.tolist(), strict=True)
    ]
    tokens = [pair for row in pairs for pair in row]
    n = len(tokens)
    rho = [math.exp(a - b) for a, b in tokens]
    expected = {
        "kl": sum(b - a for a, b in tokens) / n,
        "k3": sum(r - 1 - math.log(r) for r in rho) / n,
        "ppl_ratio": sum(math.exp(sum(b - a for a, b in row) / len(row)) for row in pairs if row)
        / sum(1 for row in pairs if row),
        "ess": sum(rho) ** 2 / (n * sum(r * r for r in rho)),
        "probs_diff_mean": sum(abs(math.exp(a) - math.exp(b)) for a, b in tokens) / n,
        "probs_diff_max": max(abs(math.exp(a) - math.exp(b)) for a, b in tokens),
        "max_log_ratio": max(abs(a - b) for a, b in tokens),
    }
    assert mismatch(old, sampler, mask) == pytest.approx(expected, abs=1e-6)


# rho of row 0: 4, 1/2, 1; of row 1: 1/4, 2; row 2 has no token
RHO = tensor([[4.0, 0.5, 1.0], [0.25, 2.0, 9.0], [9.0, 9.0, 9.0]])
MASK = tensor([[True, True, True], [True, True, False], [False, False, False]])
SAMPLER = torch.where(MASK, -1.0, NAN)
OLD = SAMPLER + RHO.log()


@pytest.mark.parametrize(
    ("kind", "cap", "low", "expected"),
    [
        ("none", 2.0, None, [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
        ("token", 2.0, None, [[2.0, 0.5, 1.0], [0.25, 2.0, 0.0]]),
        ("token", 10.0, None, [[4.0, 0.5, 1.0], [0.25, 2.0, 0.0]]),
        # products 2 and 1/2
        ("sequence", 5.0, None, [[2.0, 2.0, 2.0], [0.5, 0.5, 0.0]]),
        ("sequence", 1.5, None, [[1.5, 1.5, 1.5], [0.5, 0.5, 0.0]]),
        # the band from 1/3 to 3, from 0.1 to 3, and from 0.6 to 5
        ("band", 3.0, None, [[0.0, 0.5, 1.0], [0.0, 2.0, 0.0]]),
        ("band", 3.0, 0.1, [[0.0, 0.5, 1.0], [0.25, 2.0, 0.0]]),
        ("band", 5.0, 0.6, [[4.0, 0.0, 1.0], [0.0, 2.0, 0.0]]),
    ],
)
def test_weights_in_numbers(kind, cap, low, expected):
    got = weights(OLD, SAMPLER, MASK, kind, cap, low)
    assert_close(got, tensor([*expected, [0.0] * 3]), atol=1e-6, rtol=0)


def test_normalised_weights_have_mean_one_over_the_tokens():
    # token, cap 2: 2 + 1/2 + 1 + 1/4 + 2 = 23/4 over five tokens
    got = weights(OLD, SAMPLER, MASK, "token", 2.0, normalize=True)
    assert_close(got, tensor([[2.0, 0.5, 1.0], [0.25, 2.0, 0.0], [0.0] * 3]) / 1.15, atol=1e-6, rtol=0)
    # nothing is inside the band: no mean to divide by
    assert weights(OLD, SAMPLER, MASK, "band", 20.0, 10.0, normalize=True).tolist() == [[0.0] * 3] * 3
    assert weights(OLD, SAMPLER, MASK & False, "token", 2.0, normalize=True).tolist() == [[0.0] * 3] * 3


def test_weights_carry_no_gradient_and_extremes_stay_finite():
    old, sampler = tensor([[-900.0, 0.0]], requires_grad=True), tensor([[0.0, -900.0]])
    for kind in ("none", "token", "sequence", "band"):
        got = weights(old, sampler, torch.ones(1, 2, dtype=torch.bool), kind, 1e12)
        assert not got.requires_grad
        assert got.isfinite().all()
    got = weights(old, sampler, torch.ones(1, 2, dtype=torch.bool), "token", 1e12)
    assert_close(got, tensor([[math.exp(-20.0), math.exp(20.0)]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("criterion", "lo", "hi", "expected"),
    [
        # geometric means 2^(1/3) = 1.26 and 2^(-1/2) = 0.71
        ("seq_mean_k1", 0.7, 1.3, [True, True]),
        ("seq_mean_k1", 0.75, 1.3, [True, False]),
        ("seq_mean_k1", 0.7, 1.2, [False, True]),
        ("seq_mean_k1", None, 1.2, [False, True]),
        ("seq_mean_k1", 0.75, None, [True, False]),
        # rho - 1 - log rho: 3 - log 4, log 2 - 1/2, 0: mean 0.602; log 4 - 3/4, 1 - log 2: mean 0.472
        ("seq_mean_k3", None, 0.61, [True, True]),
        ("seq_mean_k3", None, 0.60, [False, True]),
        ("seq_mean_k3", None, 0.47, [False, False]),
        ("seq_mean_k3", 5.0, None, [True, True]),
        # smallest 1/2 and 1/4; an upper bound is not read
        ("token_veto", 0.2, None, [True, True]),
        ("token_veto", 0.3, 0.0, [True, False]),
        ("token_veto", 0.6, None, [False, False]),
        ("token_veto", None, None, [True, True]),
    ],
)
def test_kept_rows_in_numbers(criterion, lo, hi, expected):
    assert keep_rows(OLD, SAMPLER, MASK, criterion, lo, hi).tolist() == [*expected, True]


@pytest.mark.parametrize("criterion", ["seq_mean_k1", "seq_mean_k3", "token_veto"])
def test_a_row_as_near_as_can_be_is_kept_at_the_tightest_bounds(criterion):
    x = tensor([[-0.3, -7.0]])
    hi = 0.0 if criterion == "seq_mean_k3" else 1.0
    assert keep_rows(x, x, torch.ones(1, 2, dtype=torch.bool), criterion, 1.0, hi).tolist() == [True]


@pytest.mark.parametrize("criterion", ["seq_mean_k1", "seq_mean_k3", "token_veto"])
def test_a_row_without_a_token_is_kept_at_bounds_that_reject_every_other(criterion):
    assert keep_rows(OLD, SAMPLER, MASK, criterion, 5.0, -1.0).tolist() == [False, False, True]


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_correction\.weights.*did you mean 'sequence'"):
        weights(OLD, SAMPLER, MASK, "sequences", 2.0)
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_correction\.reject\.criterion.*'token_veto'"):
        keep_rows(OLD, SAMPLER, MASK, "token_vetoes", 0.1, None)
