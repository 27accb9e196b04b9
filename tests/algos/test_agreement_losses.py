"""Policy and value losses against slow float64 loops: value, closed-form slope and central differences, to 1e-6."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import tensor

from klimb.algos.loss import policy_loss, value_loss
from tests.algos.batches import SEEDS, Draw, Plane, agree

STEP = 1e-6


@dataclass(frozen=True, kw_only=True)
class Row:
    """The masked-in tokens of one row. `frozen`: the new log-probs where the formula stops the gradient."""

    new: list[float]
    frozen: list[float]
    old: list[float]
    advantages: list[float]

    def log_ratios(self, new: list[float]) -> list[float]:
        return [min(max(a - b, -20.0), 20.0) for a, b in zip(new, self.old, strict=True)]


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


def between(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped(ratio: float, advantage: float, p: dict[str, Any]) -> float:
    low, high = 1.0 - p["clip_ratio_low"], 1.0 + p["clip_ratio_high"]
    loss = max(-ratio * advantage, -between(ratio, low, high) * advantage)
    return min(loss, -p["dual_clip"] * advantage) if advantage < 0 and p["dual_clip"] is not None else loss


def is_cut(ratio: float, advantage: float, p: dict[str, Any]) -> bool:
    if advantage >= 0:
        return ratio > 1.0 + p["clip_ratio_high"]
    return ratio < 1.0 - p["clip_ratio_low"] or (p["dual_clip"] is not None and ratio > p["dual_clip"])


def clip(row: Row, p: dict[str, Any]) -> list[float]:
    return [clipped(math.exp(x), a, p) for x, a in zip(row.log_ratios(row.new), row.advantages, strict=True)]


def clip_slope(row: Row, weights: list[float], p: dict[str, Any]) -> list[float]:
    ratios = [math.exp(x) for x in row.log_ratios(row.new)]
    both = zip(ratios, row.advantages, weights, strict=True)
    return [0.0 if is_cut(r, a, p) else -r * a * w for r, a, w in both]


def gspo(row: Row, p: dict[str, Any]) -> list[float]:
    s = math.exp(mean(row.log_ratios(row.frozen)))
    tokens = zip(row.new, row.frozen, row.advantages, strict=True)
    return [clipped(s * math.exp(new - frozen), a, p) for new, frozen, a in tokens]


def gspo_slope(row: Row, weights: list[float], p: dict[str, Any]) -> list[float]:
    s = math.exp(mean(row.log_ratios(row.new)))
    return [0.0 if is_cut(s, a, p) else -s * a * w for a, w in zip(row.advantages, weights, strict=True)]


def cispo_weights(row: Row, p: dict[str, Any]) -> list[float]:
    low, high = 1.0 - p["clip_ratio_low"], 1.0 + p["clip_ratio_high"]
    return [between(math.exp(x), low, high) for x in row.log_ratios(row.frozen)]


def cispo(row: Row, p: dict[str, Any]) -> list[float]:
    tokens = zip(cispo_weights(row, p), row.advantages, row.new, strict=True)
    return [-w * a * new for w, a, new in tokens]


def cispo_slope(row: Row, weights: list[float], p: dict[str, Any]) -> list[float]:
    return [-c * a * w for c, a, w in zip(cispo_weights(row, p), row.advantages, weights, strict=True)]


def gmpo_q(log_ratio: float, advantage: float, p: dict[str, Any]) -> float:
    """The worse of the log-ratio and its clipped self, as the advantage's sign sees it."""
    bounded = between(log_ratio, -p["clip_ratio_low"], p["clip_ratio_high"])
    return min(log_ratio, bounded) if advantage > 0 else max(log_ratio, bounded)


def gmpo_value(row: Row, p: dict[str, Any]) -> float:
    q = [gmpo_q(x, a, p) for x, a in zip(row.log_ratios(row.new), row.advantages, strict=True)]
    return -mean(row.advantages) * math.exp(mean(q))


def gmpo(row: Row, p: dict[str, Any]) -> list[float]:
    return [gmpo_value(row, p)] * len(row.new)


def gmpo_slope(row: Row, weights: list[float], p: dict[str, Any]) -> list[float]:
    each = sum(weights) * gmpo_value(row, p) / len(weights)
    tokens = zip(row.log_ratios(row.new), row.advantages, strict=True)
    return [each if gmpo_q(x, a, p) == x else 0.0 for x, a in tokens]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def sapo(row: Row, p: dict[str, Any]) -> list[float]:
    result = []
    for x, a in zip(row.log_ratios(row.new), row.advantages, strict=True):
        tau = p["tau_positive"] if a > 0 else p["tau_negative"]
        result.append(-a * 4.0 / tau * sigmoid(tau * (math.exp(x) - 1.0)))
    return result


def sapo_slope(row: Row, weights: list[float], p: dict[str, Any]) -> list[float]:
    result = []
    for x, a, w in zip(row.log_ratios(row.new), row.advantages, weights, strict=True):
        tau, ratio = (p["tau_positive"] if a > 0 else p["tau_negative"]), math.exp(x)
        gate = sigmoid(tau * (ratio - 1.0))
        result.append(-a * 4.0 * gate * (1.0 - gate) * ratio * w)
    return result


def reinforce(row: Row, p: dict[str, Any]) -> list[float]:
    return [-a * new for a, new in zip(row.advantages, row.new, strict=True)]


def reinforce_slope(row: Row, weights: list[float], p: dict[str, Any]) -> list[float]:
    return [-a * w for a, w in zip(row.advantages, weights, strict=True)]


BOUNDS = {"clip_ratio_low": 0.25, "clip_ratio_high": 0.35}
NARROW = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
# name, settings, loss of the tokens of a row, slope of their weighted sum by each of the row's log-probs
LOSSES = [
    ("clip", {**BOUNDS, "dual_clip": None}, clip, clip_slope),
    ("clip", {**BOUNDS, "dual_clip": 1.5}, clip, clip_slope),
    ("clip", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "dual_clip": 3.0}, clip, clip_slope),
    ("gspo", {**NARROW, "dual_clip": None}, gspo, gspo_slope),
    ("gspo", {**NARROW, "dual_clip": 1.2}, gspo, gspo_slope),
    ("cispo", BOUNDS, cispo, cispo_slope),
    ("gmpo", BOUNDS, gmpo, gmpo_slope),
    ("sapo", {"tau_positive": 0.8, "tau_negative": 1.3}, sapo, sapo_slope),
    ("reinforce", {}, reinforce, reinforce_slope),
]
RowLoss = Callable[[Row, dict[str, Any]], list[float]]
RowSlope = Callable[[Row, list[float], dict[str, Any]], list[float]]


@dataclass(frozen=True, kw_only=True)
class Planes:
    new: Plane
    old: Plane
    advantages: Plane
    weights: Plane
    mask: list[list[bool]]

    def rows(self, new: Plane | None = None):
        """The row, the places of its tokens and their weights, of every row with a token; `new` moves the policy."""
        for b, inside in enumerate(self.mask):
            at = [t for t, m in enumerate(inside) if m]

            def take(plane: Plane, b: int = b, at: list[int] = at) -> list[float]:
                return [plane[b][t] for t in at]

            if at:
                row = Row(
                    new=take(self.new if new is None else new),
                    frozen=take(self.new),
                    old=take(self.old),
                    advantages=take(self.advantages),
                )
                yield b, at, row, take(self.weights)

    def spread(self, numbers: Callable[[Row, list[float]], list[float]]) -> Plane:
        result = [[0.0] * len(row) for row in self.mask]
        for b, at, row, weights in self.rows():
            for t, x in zip(at, numbers(row, weights), strict=True):
                result[b][t] = x
        return result

    def differences(self, loss: RowLoss, settings: dict[str, Any]) -> Plane:
        """Central differences of the weighted sum by every log-prob, what the formula freezes kept still."""

        def total(new: Plane) -> float:
            return sum(
                sum(w * x for w, x in zip(weights, loss(row, settings), strict=True))
                for _, _, row, weights in self.rows(new)
            )

        result = [[0.0] * len(row) for row in self.mask]
        for b, row in enumerate(self.new):
            for t in range(len(row)):
                up, down = ([list(r) for r in self.new] for _ in range(2))
                up[b][t] += STEP
                down[b][t] -= STEP
                result[b][t] = (total(up) - total(down)) / (2 * STEP)
        return result


@pytest.mark.parametrize(("name", "settings", "slow", "slope"), LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_loss(seed, name, settings, slow: RowLoss, slope: RowSlope):
    draw = Draw(seed)
    old, advantages, weights = -draw.plane().abs(), draw.plane(), draw.plane().abs()
    new = (old + draw.plane(0.8)).requires_grad_()
    loss, _ = policy_loss(name, new, old, advantages, draw.mask, **settings)
    (weights * loss).sum().backward()
    planes = Planes(
        new=new.tolist(),
        old=old.tolist(),
        advantages=advantages.tolist(),
        weights=weights.tolist(),
        mask=draw.mask.tolist(),
    )
    agree(loss, planes.spread(lambda row, _: slow(row, settings)))
    agree(new.grad, planes.spread(lambda row, w: slope(row, w, settings)))
    if seed < 8:
        agree(new.grad, planes.differences(slow, settings))


# Beyond the clamp at 20 the ratio stands still. exp(20) is 4.9e8, so float32 numbers agree to one in a million.
@pytest.mark.parametrize("log_ratio", [25.0, -25.0])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(("name", "settings", "slow", "slope"), LOSSES)
def test_policy_loss_beyond_the_clamp(name, settings, slow: RowLoss, slope: RowSlope, advantage, log_ratio):
    old = -30.0
    new = tensor([[old + log_ratio]], requires_grad=True)
    loss, _ = policy_loss(name, new, tensor([[old]]), tensor([[advantage]]), tensor([[True]]), **settings)
    row = Row(new=[old + log_ratio], frozen=[old + log_ratio], old=[old], advantages=[advantage])
    assert loss.item() == pytest.approx(slow(row, settings)[0], rel=1e-5)
    assert loss.isfinite().all()
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    if name in ("clip", "sapo"):
        assert new.grad.item() == 0.0
    if name in ("cispo", "reinforce"):
        assert new.grad.item() == pytest.approx(slope(row, [1.0], settings)[0], rel=1e-6)


def slow_value(value: float, old: float, ret: float, bound: float | None) -> tuple[float, float]:
    """Loss of one token and its slope, from the branch that is in force."""
    plain = 0.5 * (value - ret) ** 2
    other = plain if bound is None else 0.5 * (between(value, old - bound, old + bound) - ret) ** 2
    return (other, 0.0) if other > plain else (plain, value - ret)


@pytest.mark.parametrize("bound", [None, 0.5, 0.1])
@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed, bound):
    draw = Draw(seed)
    old, returns = draw.plane(), draw.plane()
    values = (old + draw.plane(0.5)).requires_grad_()
    loss, _ = value_loss(values, old, returns, bound, draw.mask)
    loss.sum().backward()
    losses, slopes, differences = ([[0.0] * draw.shape[1] for _ in range(draw.shape[0])] for _ in range(3))
    for b, t in draw.mask.nonzero().tolist():
        v, rest = values[b, t].item(), (old[b, t].item(), returns[b, t].item(), bound)
        losses[b][t], slopes[b][t] = slow_value(v, *rest)
        differences[b][t] = (slow_value(v + STEP, *rest)[0] - slow_value(v - STEP, *rest)[0]) / (2 * STEP)
    agree(loss, losses)
    agree(values.grad, slopes)
    agree(values.grad, differences)
