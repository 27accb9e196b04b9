"""The engine/trainer mismatch, in numbers and against a plain loop."""

import math
import random

import pytest
import torch
from torch import tensor

from klimb.algos.correction import mismatch

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
