"""GAE, KL and aggregation against slow float64 loops written from the formulas, value and gradient to 1e-6."""

import math

import pytest

from klimb.algos.advantage import gae
from klimb.algos.kl import estimate
from klimb.algos.ops import LOSS_AGGS, token_weights
from tests.algos.batches import SEEDS, Draw, Plane, agree


def slow_gae(rewards: Plane, values: Plane, mask: list, gamma: float, lam: float, last: list) -> tuple[Plane, Plane]:
    """A_k = sum over l of (gamma lam)^l delta_{k+l}: the sum itself, not the recursion."""
    advantages = [[0.0] * len(row) for row in rewards]
    returns = [[0.0] * len(row) for row in rewards]
    for b, row in enumerate(mask):
        at = [t for t, m in enumerate(row) if m]
        after = dict(zip(at, [values[b][t] for t in at[1:]] + [last[b]], strict=False))
        deltas = [rewards[b][t] + gamma * after[t] - values[b][t] for t in at]
        for k, t in enumerate(at):
            advantages[b][t] = sum((gamma * lam) ** i * delta for i, delta in enumerate(deltas[k:]))
            returns[b][t] = advantages[b][t] + values[b][t]
    return advantages, returns


@pytest.mark.parametrize("seed", SEEDS)
def test_gae(seed):
    draw = Draw(seed)
    rewards, values, last = draw.plane(), draw.plane(), draw.row()
    gamma, lam = draw.rng.uniform(0.8, 1.0), draw.rng.uniform(0.5, 1.0)
    expected = slow_gae(rewards.tolist(), values.tolist(), draw.mask.tolist(), gamma, lam, last.tolist())
    for got, slow in zip(gae(rewards, values, draw.mask, gamma, lam, last), expected, strict=True):
        agree(got, slow)


def slow_kl(name: str, d: float) -> tuple[float, float]:
    """Value and derivative with respect to the policy's log-probability."""
    x = min(max(-d, -20.0), 20.0)
    k3 = math.exp(x) - x - 1.0
    value, slope = {
        "k1": (d, 1.0),
        "abs": (abs(d), math.copysign(1.0, d)),
        "k2": (0.5 * d * d, d),
        "k3": (min(k3, 10.0), 1.0 - math.exp(-d) if k3 < 10.0 and abs(d) < 20.0 else 0.0),
    }[name.removesuffix("+")]
    return value, d if name.endswith("+") else slope


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_estimators(seed, name):
    draw = Draw(seed)
    reference = draw.plane()
    logprobs = (reference + draw.plane(1.5)).requires_grad_()
    kl = estimate(name, logprobs, reference)
    kl.sum().backward()
    slow = [
        [slow_kl(name, new - ref) for new, ref in zip(*row, strict=True)]
        for row in zip(logprobs.tolist(), reference.tolist(), strict=True)
    ]
    agree(kl, [[value for value, _ in row] for row in slow])
    agree(logprobs.grad, [[slope for _, slope in row] for row in slow])


def slow_weights(mask: list[list[bool]], loss_agg: str, max_tokens: int) -> Plane:
    lengths = [sum(row) for row in mask]
    rows = sum(1 for length in lengths if length)
    return [
        [
            {
                "token-mean": 1 / sum(lengths),
                "seq-mean-token-mean": 1 / rows / length,
                "seq-mean-token-sum": 1 / rows,
                "seq-mean-token-sum-norm": 1 / rows / max_tokens,
            }[loss_agg]
            if m
            else 0.0
            for m in row
        ]
        for row, length in zip(mask, lengths, strict=True)
    ]


@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
@pytest.mark.parametrize("seed", SEEDS)
def test_token_weights(seed, loss_agg):
    draw = Draw(seed)
    agree(token_weights(draw.mask, loss_agg, 32), slow_weights(draw.mask.tolist(), loss_agg, 32))
