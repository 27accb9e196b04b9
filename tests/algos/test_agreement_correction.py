"""Correction weights and rejection against slow float64 loops written from the formulas."""

import math
import statistics

import pytest
import torch
from torch import Tensor

from klimb.algos.correction import keep_rows, weights
from tests.algos.batches import SEEDS, Draw, Plane, agree


def log_ratios(old: Tensor, sampler: Tensor, mask: Tensor) -> list[dict[int, float]]:
    """Place -> log rho of every row's masked-in tokens."""
    rows = zip(old.tolist(), sampler.tolist(), mask.tolist(), strict=True)
    return [{t: a - b for t, (a, b, inside) in enumerate(zip(*row, strict=True)) if inside} for row in rows]


def slow_weights(old: Tensor, sampler: Tensor, mask: Tensor, kind: str, cap: float, low: float) -> Plane:
    result = [[0.0] * mask.shape[1] for _ in range(mask.shape[0])]
    for b, row in enumerate(log_ratios(old, sampler, mask)):
        product = math.prod(math.exp(x) for x in row.values())
        for t, x in row.items():
            rho = math.exp(x)
            result[b][t] = {
                "none": 1.0,
                "token": min(rho, cap),
                "sequence": min(product, cap),
                "band": rho if low <= rho <= cap else 0.0,
            }[kind]
    return result


@pytest.mark.parametrize("kind", ["none", "token", "sequence", "band"])
@pytest.mark.parametrize("seed", SEEDS)
def test_weights(seed, kind):
    draw = Draw(seed)
    old = -draw.plane().abs()
    sampler = old + draw.plane(0.4)
    cap, low = draw.rng.uniform(1.1, 2.0), draw.rng.uniform(0.4, 0.9)
    hidden = [torch.where(draw.mask, x, math.nan) for x in (old, sampler)]
    expected = slow_weights(old, sampler, draw.mask, kind, cap, low)
    agree(weights(*hidden, draw.mask, kind, cap, low), expected)
    agree(weights(*hidden, draw.mask, kind, cap), slow_weights(old, sampler, draw.mask, kind, cap, 1.0 / cap))
    inside = [expected[b][t] for b, t in draw.mask.nonzero().tolist()]
    mean = statistics.fmean(inside) if inside and any(inside) else 1.0
    agree(
        weights(*hidden, draw.mask, kind, cap, low, normalize=True),
        [[x / mean for x in row] for row in expected],
    )


def slow_keep(row: dict[int, float], criterion: str, lo: float | None, hi: float | None) -> bool:
    if not row:
        return True
    rho = [math.exp(x) for x in row.values()]
    geometric = math.prod(rho) ** (1.0 / len(rho))
    k3 = statistics.fmean(r - 1.0 - math.log(r) for r in rho)
    above, below = lo is None, hi is None
    return {
        "seq_mean_k1": (above or geometric >= lo) and (below or geometric <= hi),
        "seq_mean_k3": below or k3 <= hi,
        "token_veto": above or min(rho) >= lo,
    }[criterion]


@pytest.mark.parametrize(
    ("criterion", "lo", "hi"),
    [
        ("seq_mean_k1", 0.9, 1.1),
        ("seq_mean_k1", None, 1.05),
        ("seq_mean_k1", 0.95, None),
        ("seq_mean_k3", 0.99, 0.04),
        ("seq_mean_k3", None, None),
        ("token_veto", 0.75, 1e-9),
        ("token_veto", None, 0.9),
    ],
)
def test_keep_rows(criterion, lo, hi):
    found = []
    for seed in SEEDS:
        draw = Draw(seed)
        old = -draw.plane().abs()
        sampler = old + draw.plane(0.3)
        got = keep_rows(
            torch.where(draw.mask, old, math.nan), torch.where(draw.mask, sampler, 77.0), draw.mask, criterion, lo, hi
        ).tolist()
        assert got == [slow_keep(row, criterion, lo, hi) for row in log_ratios(old, sampler, draw.mask)]
        found += got
    read = {"seq_mean_k1": (lo, hi), "seq_mean_k3": (hi,), "token_veto": (lo,)}[criterion]
    assert any(found), "some rows are kept"
    assert (False in found) == any(bound is not None for bound in read)
