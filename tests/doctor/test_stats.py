from __future__ import annotations

import numpy as np
import pytest

from klimb.doctor.stats import noise, risen, rolling_median, spans, trend
from klimb.doctor.table import Curve


def curve(values: list[float] | np.ndarray) -> Curve:
    array = np.asarray(values, dtype=np.float64)
    return Curve(steps=np.arange(len(array)), values=array)


def test_spans_by_hand() -> None:
    flags = np.array([0, 1, 0, 1, 1, 1, 0, 0, 0, 1], dtype=bool)
    (span,) = spans(flags, 3, 4)
    assert (span.first, span.named, span.last) == (1, 4, 5)
    assert spans(np.zeros(5, dtype=bool), 1, 1) == []
    assert spans(np.zeros(0, dtype=bool), 1, 3) == []
    single = spans(flags, 1, 1)
    assert [(s.first, s.last) for s in single] == [(1, 1), (3, 5), (9, 9)]


def slow_spans(flags: list[bool], need: int, of: int) -> list[tuple[int, int]]:
    """Index where each stretch is named, and its last flagged index."""
    active = [sum(flags[max(0, i - of + 1) : i + 1]) >= need for i in range(len(flags))]
    out: list[tuple[int, int]] = []
    for i, on in enumerate(active):
        if on and (i == 0 or not active[i - 1]):
            end = i
            while end + 1 < len(active) and active[end + 1]:
                end += 1
            out.append((i, max(j for j in range(end + 1) if flags[j])))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_spans_agree_with_a_slow_walk(seed: int) -> None:
    rng = np.random.default_rng(seed)
    flags = rng.random(40) < 0.5
    need, of = int(rng.integers(1, 4)), int(rng.integers(4, 7))
    assert [(s.named, s.last) for s in spans(flags, need, of)] == slow_spans(flags.tolist(), need, of)


def test_rolling_median_looks_back_only() -> None:
    values = np.array([1.0, 9.0, 2.0, 3.0, 100.0, 4.0])
    expected = [np.median(values[max(0, i - 2) : i + 1]) for i in range(len(values))]
    assert rolling_median(values, 3).tolist() == expected


def test_a_trend_is_found_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    found = trend(curve(np.linspace(0, 1, 60) + 0.2 * rng.standard_normal(60)))
    assert found is not None
    assert found.p < 0.01
    assert found.change == pytest.approx(0.92, abs=0.3)
    ps = [t.p for s in range(200) if (t := trend(curve(np.random.default_rng(s).standard_normal(60)))) is not None]
    assert np.mean(np.array(ps) < 0.05) < 0.09
    assert trend(curve([1.0, 2.0, 3.0])) is None
    flat = trend(curve([1.0] * 9))
    assert flat is not None
    assert (flat.change, flat.p) == (0.0, 1.0)


def test_risen_compares_the_end_with_the_start() -> None:
    rng = np.random.default_rng(1)
    found = risen(curve(np.r_[np.zeros(5), np.ones(30)] + 0.1 * rng.standard_normal(35)), 5)
    assert found is not None
    assert found.p < 0.001
    assert found.change == pytest.approx(1.0, abs=0.2)
    falling = risen(curve(np.linspace(1, 0, 40)), 5)
    assert falling is not None
    assert falling.p > 0.9
    assert risen(curve([1.0] * 7), 5) is None


def test_noise_does_not_see_the_trend_nor_a_jump() -> None:
    rng = np.random.default_rng(2)
    values = np.linspace(0, 5, 500) + 0.1 * rng.standard_normal(500)
    assert noise(values) == pytest.approx(0.1, rel=0.15)
    values[250:] += 100
    assert noise(values) == pytest.approx(0.1, rel=0.15)
    assert noise(np.array([1.0, 2.0])) == 0.0
