"""Values of the table against numbers computed by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from klimb.comparison.table import (
    KL,
    REWARD,
    ArmRows,
    csv_rows,
    over_seeds,
    running_mean,
    series,
    table,
    whole_seeds,
    window_mean,
)

Rows = list[dict[str, float]]


def rows(values: list[float]) -> Rows:
    """The evaluation before training, and a step for each value."""
    return [{"step": 0.0, "eval/reward": 9.0}, *({"step": i + 1.0, KL: v, REWARD: v} for i, v in enumerate(values))]


def arm(label: str, *runs: Rows, first: int = 0) -> ArmRows:
    return ArmRows(label=label, runs=dict(enumerate(runs, first)), target=None)


def test_a_row_is_the_mean_of_the_twenty_steps_before_it() -> None:
    found = table([arm("a", rows([float(i) for i in range(1, 101)]))], 50)
    assert [row.step for row in found] == [0, 50, 100]
    assert found[0].values["a"][KL].mean == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)
    assert found[1].values["a"][KL].mean == pytest.approx((31 + 50) / 2)
    assert found[2].values["a"][KL].mean == pytest.approx((81 + 100) / 2)
    assert found[2].values["a"][KL].spread is None


def test_rows_closer_than_twenty_steps_do_not_overlap() -> None:
    found = table([arm("a", rows([float(i) for i in range(1, 21)]))], 10)
    assert found[2].values["a"][KL].mean == pytest.approx((11 + 20) / 2)


def test_the_last_step_has_a_row_when_the_length_is_no_multiple() -> None:
    assert [row.step for row in table([arm("a", rows([1.0] * 70))], 50)] == [0, 50, 70]


def test_the_table_ends_where_the_shortest_run_does() -> None:
    arms = [arm("a", rows([1.0] * 100)), arm("b", rows([1.0] * 100), rows([2.0] * 60))]
    assert [row.step for row in table(arms, 50)] == [0, 50, 60]


def test_steps_count_and_not_lines() -> None:
    """Steps 3 and 4 are missing, 2 was made twice: the later one holds."""
    found: Rows = [{"step": 1.0, KL: 1.0}, {"step": 2.0, KL: 9.0}, {"step": 2.0, KL: 2.0}, {"step": 5.0, KL: 5.0}]
    assert series(found, KL)[:2] == [1.0, 2.0]
    assert [math.isnan(v) for v in series(found, KL)] == [False, False, True, True, False]
    assert series([{"step": 0.0, KL: 7.0}], KL) == []


def test_several_seeds_give_a_mean_and_a_sample_standard_deviation() -> None:
    found = over_seeds([1.0, 2.0, 6.0])
    assert found.mean == pytest.approx(3.0)
    assert found.spread == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert found.shown(".1f") == "3.0 ± 2.6"


def test_small_values_keep_their_digits_and_none_is_a_dash() -> None:
    assert over_seeds([1.26e-6]).shown(".4f") == "1.3e-06"
    assert over_seeds([0.0]).shown(".4f") == "0.0000"
    assert over_seeds([math.nan]).shown(".4f") == "-"


def test_values_that_are_not_finite_are_left_out() -> None:
    assert window_mean([1.0, math.nan, 3.0], 3) == 2.0
    assert math.isnan(window_mean([math.nan], 1))


def test_the_running_mean_is_the_window_mean_at_every_step() -> None:
    rng = random.Random(0)
    values = [math.nan if rng.random() < 0.2 else rng.gauss(0, 1) for _ in range(90)]
    values[30:55] = [math.nan] * 25
    slow = [window_mean(values[: i + 1], 20) for i in range(len(values))]
    np.testing.assert_allclose(running_mean(values, 20), slow, atol=1e-12)


def test_a_seed_that_has_only_begun_does_not_cut_the_table() -> None:
    long, short = rows([1.0] * 100), rows([1.0] * 14)
    kept, left = whole_seeds([arm("a", long, long), arm("b", long, short)])
    assert [list(one.runs) for one in kept] == [[0], [0]]
    assert left == [1]


def test_a_seed_that_one_arm_lacks_is_left_out() -> None:
    long = rows([1.0] * 100)
    kept, left = whole_seeds([arm("a", long, long), arm("b", long, first=1)])
    assert [list(one.runs) for one in kept] == [[1], [1]]
    assert left == [0]


def test_no_steps_make_a_table_of_the_start_alone() -> None:
    found = table([arm("a", [])], 50)
    assert [row.step for row in found] == [0]
    assert math.isnan(found[0].values["a"][KL].mean)


def test_csv_has_a_line_for_every_row_arm_and_seed() -> None:
    arms = [arm(label, rows([1.0] * 20), rows([2.0] * 20)) for label in "ab"]
    lines = csv_rows(arms, 10)
    assert len(lines) == 3 * 2 * 2
    assert {"step": 20, "arm": "b", "seed": 1, KL: 2.0, REWARD: 2.0} in lines
