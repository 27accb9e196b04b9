"""Sentences say what the numbers support and nothing more."""

from __future__ import annotations

import math
import random
import re

import pytest
from scipy import stats

from klimb.comparison.table import KL, REWARD, ArmRows
from klimb.comparison.verdict import difference, held_from, peak, seconds, trend, verdict

Pairs = list[tuple[float, float]]


def arm(label: str, runs: list[Pairs], target: float | None = None, time: float = 1.0) -> ArmRows:
    """Each run is a list of (KL, reward)."""
    return ArmRows(
        label=label,
        runs={
            seed: [
                {"step": i + 1.0, KL: kl, REWARD: reward, "time/step": time, "memory/update_peak": 3 * 2.0**20}
                for i, (kl, reward) in enumerate(run)
            ]
            for seed, run in enumerate(runs)
        },
        target=target,
    )


def noisy(rng: random.Random, length: int, kl: float, reward: float, slope: float = 0.0) -> Pairs:
    return [(kl + slope * i + rng.gauss(0, 0.003), reward + rng.gauss(0, 0.05)) for i in range(length)]


def test_the_difference_over_seeds_is_the_paired_t_interval() -> None:
    found = difference([0.1, 0.2, 0.4], [0.2, 0.5, 0.6])
    interval = stats.ttest_1samp([0.1, 0.3, 0.2], 0.0).confidence_interval(0.95)
    assert found.mean == pytest.approx(0.2)
    assert found.half == pytest.approx((interval.high - interval.low) / 2)


def test_a_rise_and_a_fall_are_found_and_a_level_is_not_called_one_more_often_than_said() -> None:
    rng = random.Random(0)
    assert trend([0.001 * i + rng.gauss(0, 0.02) for i in range(300)])[0] == 1
    assert trend([0.4 - 0.001 * i + rng.gauss(0, 0.02) for i in range(300)])[0] == -1
    wrong = sum(trend([rng.gauss(0, 1) for _ in range(300)])[0] != 0 for _ in range(200))
    assert wrong <= 20  # 5% expected, 10% allowed


def test_the_start_that_every_run_has_is_no_trend() -> None:
    """KL climbs from 0 to its level within 60 steps and stays there."""
    rng = random.Random(1)
    wrong = sum(
        trend([0.02 * (1 - math.exp(-i / 20)) + rng.gauss(0, 0.005) for i in range(300)])[0] != 0 for _ in range(200)
    )
    assert wrong <= 20


def test_a_short_series_has_no_trend() -> None:
    assert trend([float(i) for i in range(148)]) == (0, 1.0)


def test_held_from_is_the_step_after_the_last_departure() -> None:
    run = [(0.05, 0.0)] * 40 + [(0.02, 0.0)] * 60
    assert held_from(arm("a", [run], target=0.02), 100) == 40 + 14  # 14 of 20 at the target: mean 0.029
    assert held_from(arm("a", [[*run, *[(0.5, 0.0)] * 5]], target=0.02), 105) is None
    assert held_from(arm("a", [[*run, *[(0.5, 0.0)] * 5]], target=0.02), 100) == 54  # what comes later is not compared
    assert held_from(arm("a", [run]), 100) is None


def test_single_values_that_are_not_finite_do_not_undo_it() -> None:
    run = [(0.02, 0.0)] * 97 + [(math.nan, 0.0)] * 3
    assert "within half of it from step 20 on" in verdict([arm("a", [run], target=0.02)])[0]


def test_no_winner_is_named_inside_the_noise() -> None:
    rng, called = random.Random(1), 0
    for _ in range(100):
        arms = [arm(label, [noisy(rng, 40, 0.02, 0.5) for _ in range(3)]) for label in ("one", "two")]
        called += any(line.startswith(("reward: higher", "reward: lower")) for line in verdict(arms))
    assert called <= 11  # 5 expected


def test_one_seed_names_no_winner_and_says_why() -> None:
    lines = verdict([arm("a", [[(0.02, 0.1)] * 40]), arm("b", [[(0.06, 0.9)] * 40])])
    assert "KL: 0.0200 (a) and 0.0600 (b), 3 times the first's" in lines
    assert "reward: 0.100 (a) and 0.900 (b)" in lines
    assert lines[-1].startswith("One seed")


def test_a_difference_that_is_there_is_named_with_its_size() -> None:
    rng = random.Random(2)
    explicit = arm("true", [noisy(rng, 200, 0.02, 0.6) for _ in range(3)], target=0.02)
    cached = arm("false", [noisy(rng, 200, 0.02, 0.6, slope=0.0005) for _ in range(3)])
    lines = verdict([explicit, cached])
    assert "within half of it from step 20 on" in lines[0]
    assert "rises" not in lines[0]
    assert "rises after the first third (in every seed" in lines[1]
    assert any(line.startswith("KL: higher with false: ") and "times the first's" in line for line in lines)


def test_a_trend_of_the_mean_is_named_where_single_seeds_are_too_noisy() -> None:
    rng = random.Random(4)
    lines = verdict([arm("false", [noisy(rng, 300, 0.02, 0.6, slope=5e-6) for _ in range(4)])])
    assert "rises after the first third as a mean over seeds (Kendall's test, p 0.0" in lines[0]
    assert re.search(r"by itself in [0-3] of 4\)", lines[0])


def test_an_arm_that_died_is_not_called_the_same() -> None:
    dead = [(0.02, 0.5)] * 40 + [(math.nan, math.nan)] * 20
    lines = verdict([arm("a", [[(0.02, 0.5)] * 60] * 2), arm("b", [dead] * 2)])
    assert "b: no finite KL in the last 20 steps" in lines
    assert any("so nothing is compared" in line for line in lines)
    assert not any("noise" in line for line in lines)


def test_time_and_memory_are_medians_and_peaks_and_called_the_same_when_close() -> None:
    fast, slow = arm("fast", [[(0.0, 0.0)] * 20]), arm("slow", [[(0.0, 0.0)] * 20], time=1.5)
    assert seconds(slow) == 1.5
    assert peak(slow) == 3.0
    lines = verdict([fast, slow])
    assert "time of a step, as it was measured: 1 s (fast) and 1.5 s (slow), 1.5 times the first's" in lines
    assert "memory peak: the same within 5% (3 and 3 MiB)" in lines


def test_nothing_is_concluded_from_a_few_steps() -> None:
    assert verdict([arm("a", [[(0.0, 0.0)] * 4]), arm("b", [[(0.0, 0.0)] * 9])]) == [
        "4 steps in every arm are too few to say anything; nothing is concluded"
    ]
