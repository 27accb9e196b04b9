"""Curves that a browser can draw and that hide nothing."""

from __future__ import annotations

import math

import pytest

from klimb.report.series import DRAWN, Curve, buckets, curve, plain, smooth, thin

NAN = math.nan


def test_a_curve_has_the_steps_that_have_the_metric() -> None:
    assert curve([{"step": 0}, {"step": 1, "a": 2.0}, {"step": 3, "a": 4.0}], "a", 0.5) == Curve([1, 3], [1.0, 2.0])


def test_short_curves_are_drawn_whole() -> None:
    full = Curve(list(range(DRAWN)), [0.0] * DRAWN)
    assert thin(full) is full


@pytest.mark.parametrize("spike", [50.0, -50.0])
def test_thinning_keeps_spikes_ends_and_holes(spike: float) -> None:
    values = [math.sin(i / 500) for i in range(20_000)]
    values[7777], values[12_345] = spike, NAN
    drawn = thin(Curve(list(range(20_000)), values))
    assert len(drawn.steps) <= DRAWN + 2
    assert drawn.steps == sorted(set(drawn.steps))
    assert (drawn.steps[0], drawn.steps[-1]) == (0, 19_999)
    assert drawn.values[drawn.steps.index(7777)] == spike
    assert math.isnan(drawn.values[drawn.steps.index(12_345)])


def test_thinning_of_nothing_finite() -> None:
    drawn = thin(Curve(list(range(9000)), [NAN] * 9000))
    assert 100 < len(drawn.steps) <= DRAWN + 2
    assert drawn.finite == []


def test_smoothing_by_hand() -> None:
    # 10 values: span 10, so each step back weighs 9/11.
    smoothed = smooth(Curve([1, 2, 3], [1.0, NAN, 2.0]))
    assert smoothed.values[0] == 1.0
    assert math.isnan(smoothed.values[1])
    assert smoothed.values[2] == pytest.approx((9 / 11 * 1 + 2) / (9 / 11 + 1))


def test_a_constant_stays_where_it_is() -> None:
    assert smooth(Curve(list(range(500)), [3.0] * 500)).values == pytest.approx([3.0] * 500)


def test_buckets_share_their_steps() -> None:
    rows = [{"step": float(i), "time/a": 1.0, **({"time/b": 4.0} if i % 2 else {})} for i in range(1, 9)]
    found = buckets(rows, ["time/a", "time/b"], limit=4)
    assert found["time/a"] == Curve([0, 2, 4, 6, 8], [1.0] * 5)
    assert found["time/b"] == Curve([0, 2, 4, 6, 8], [2.0] * 5)


def test_plain_values_for_json() -> None:
    assert plain([1 / 3, NAN, -math.inf]) == [0.333333, None, None]
