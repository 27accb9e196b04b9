"""Sentences say what the numbers support and nothing more."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from klimb.comparison.table import KL, REWARD, ArmRows
from klimb.comparison.verdict import cost, difference, held_from, rises, standard_error, verdict


def arm(
    label: str, runs: list[list[tuple[float, float]]], target: float | None = None, seconds: float = 1.0
) -> ArmRows:
    """Each run is a list of (KL, reward)."""
    return ArmRows(
        label=label,
        runs={
            seed: [
                {"step": i + 1.0, KL: kl, REWARD: reward, "time/step": seconds, "memory/update_peak": 3 * 2.0**20}
                for i, (kl, reward) in enumerate(run)
            ]
            for seed, run in enumerate(runs)
        },
        target=target,
    )


def noisy(rng: random.Random, length: int, kl: float, reward: float, slope: float = 0.0) -> list[tuple[float, float]]:
    return [(kl + slope * i + rng.gauss(0, 0.003), reward + rng.gauss(0, 0.05)) for i in range(length)]


def test_the_difference_over_seeds_is_the_paired_t_interval() -> None:
    first = arm("a", [[(0.0, r)] * 20 for r in (0.1, 0.2, 0.4)])
    second = arm("b", [[(0.0, r)] * 20 for r in (0.2, 0.5, 0.6)])
    gaps = [0.1, 0.3, 0.2]
    found = difference(first, second, REWARD, 20)
    interval = stats.ttest_1samp(gaps, 0.0).confidence_interval(0.95)
    assert found.seeds == 3
    assert found.mean == pytest.approx(0.2)
    assert found.half == pytest.approx((interval.high - interval.low) / 2)


def test_the_standard_error_of_independent_values_is_the_usual_one() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(4000)]
    assert standard_error(values) == pytest.approx(1 / math.sqrt(4000), rel=0.1)


def test_alike_neighbours_widen_the_standard_error() -> None:
    """AR(1) with 0.8: the variance of the mean is (1 + 0.8) / (1 - 0.8) = 9 times the independent one's."""
    rng, x, values = random.Random(0), 0.0, list[float]()
    for _ in range(20_000):
        x = 0.8 * x + rng.gauss(0, 0.6)
        values.append(x)
    assert standard_error(values) == pytest.approx(3 / math.sqrt(20_000), rel=0.1)


def test_too_few_values_have_no_standard_error() -> None:
    assert standard_error([1.0, 2.0]) == math.inf


def test_a_rise_is_found_and_a_level_is_not_called_one_more_often_than_said() -> None:
    rng = random.Random(0)
    assert rises([0.001 * i + rng.gauss(0, 0.02) for i in range(300)])[0]
    assert not rises([0.1 - 0.001 * i + rng.gauss(0, 0.01) for i in range(300)])[0]
    wrong = sum(rises([rng.gauss(0, 1) for _ in range(200)])[0] for _ in range(200))
    assert wrong <= 20  # 5% expected, 10% allowed


def test_a_short_series_has_no_trend() -> None:
    assert rises([float(i) for i in range(99)]) == (False, 1.0)


def test_held_from_is_the_step_after_the_last_departure() -> None:
    run = [(0.05, 0.0)] * 40 + [(0.02, 0.0)] * 60
    assert held_from(arm("a", [run], target=0.02)) == 40 + 14  # 14 of 20 at the target: mean 0.029
    assert held_from(arm("a", [run + [(0.2, 0.0)] * 5], target=0.02)) is None
    assert held_from(arm("a", [run])) is None


def test_no_winner_is_named_inside_the_noise() -> None:
    rng = random.Random(1)
    for _ in range(20):
        first = arm("one", [noisy(rng, 100, 0.02, 0.5) for _ in range(3)])
        second = arm("two", [noisy(rng, 100, 0.02, 0.5) for _ in range(3)])
        if difference(first, second, REWARD, 100).is_sure:
            continue  # one in twenty is, by chance
        line = next(line for line in verdict([first, second]) if line.startswith("reward"))
        assert "inside the noise" in line


def test_a_difference_that_is_there_is_named_with_its_size() -> None:
    rng = random.Random(2)
    explicit = arm("true", [noisy(rng, 200, 0.02, 0.6) for _ in range(3)], target=0.02)
    cached = arm("false", [noisy(rng, 200, 0.02, 0.6, slope=0.0005) for _ in range(3)])
    lines = verdict([explicit, cached])
    assert lines[0].startswith("true: KL ends at 0.0197")
    assert "within half of it from step 20 on" in lines[0]
    assert "it rises" in lines[1]
    assert "it rises" not in lines[0]
    assert any(line.startswith("KL: 0.11") and "times as high" in line for line in lines)


def test_time_and_memory_are_medians_and_peaks_and_called_the_same_when_close() -> None:
    fast, slow = arm("fast", [[(0.0, 0.0)] * 20], seconds=1.0), arm("slow", [[(0.0, 0.0)] * 20], seconds=1.5)
    assert cost(slow, "time/step") == 1.5
    assert cost(slow, "memory/peak") == 3.0
    lines = verdict([fast, slow])
    assert "time of a step: slow takes 1.50 times fast's (1.5 against 1 s)" in lines
    assert "memory peak: the same within 5% (3 and 3 MiB)" in lines


def test_one_seed_is_said_to_be_one() -> None:
    assert "One seed" in verdict([arm("a", [[(0.0, 0.0)] * 20]), arm("b", [[(0.0, 0.0)] * 20])])[-1]


def test_nothing_is_concluded_from_a_few_phases() -> None:
    assert verdict([arm("a", [[(0.0, 0.0)] * 4]), arm("b", [[(0.0, 0.0)] * 4])]) == [
        "4 phases are too few to say anything; nothing is concluded"
    ]
