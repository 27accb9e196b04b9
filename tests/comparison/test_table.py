"""Values of the table against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from klimb.comparison.table import KL, REWARD, ArmRows, csv_rows, over_seeds, table, turns, window_mean


def rows(kl: list[float], reward: list[float] | None = None) -> list[dict[str, float]]:
    reward = kl if reward is None else reward
    return [
        {"step": 0.0, "eval/reward": 9.0},
        *({"step": i + 1.0, KL: k, REWARD: r} for i, (k, r) in enumerate(zip(kl, reward, strict=True))),
    ]


def test_a_row_is_the_mean_of_the_twenty_steps_before_it() -> None:
    arm = ArmRows(label="a", runs={0: rows([float(i) for i in range(1, 101)])}, target=None)
    found = table([arm], 50)
    assert [row.step for row in found] == [0, 50, 100]
    assert found[0].values["a"][KL].mean == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)
    assert found[1].values["a"][KL].mean == pytest.approx((31 + 50) / 2)
    assert found[2].values["a"][KL].mean == pytest.approx((81 + 100) / 2)
    assert found[2].values["a"][KL].spread is None


def test_rows_closer_than_twenty_steps_do_not_overlap() -> None:
    arm = ArmRows(label="a", runs={0: rows([float(i) for i in range(1, 21)])}, target=None)
    assert table([arm], 10)[2].values["a"][KL].mean == pytest.approx((11 + 20) / 2)


def test_the_last_step_has_a_row_when_the_length_is_no_multiple() -> None:
    arm = ArmRows(label="a", runs={0: rows([1.0] * 70)}, target=None)
    assert [row.step for row in table([arm], 50)] == [0, 50, 70]


def test_the_table_ends_where_the_shortest_run_does() -> None:
    arms = [
        ArmRows(label="a", runs={0: rows([1.0] * 100)}, target=None),
        ArmRows(label="b", runs={0: rows([1.0] * 100), 1: rows([2.0] * 60)}, target=None),
    ]
    assert [row.step for row in table(arms, 50)] == [0, 50, 60]


def test_several_seeds_give_a_mean_and_a_sample_standard_deviation() -> None:
    found = over_seeds([1.0, 2.0, 6.0])
    assert found.mean == pytest.approx(3.0)
    assert found.spread == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert found.shown(".1f") == "3.0 ± 2.6"


def test_values_that_are_not_finite_are_left_out_and_none_is_nan() -> None:
    assert window_mean([1.0, math.nan, 3.0], 3, 3) == 2.0
    assert math.isnan(window_mean([math.nan], 1, 1))
    assert math.isnan(over_seeds([math.nan]).mean)


def test_the_evaluation_before_training_is_no_phase() -> None:
    assert [row["step"] for row in turns(rows([1.0, 2.0]))] == [1, 2]


def test_no_rows_make_a_table_of_the_start_alone() -> None:
    found = table([ArmRows(label="a", runs={0: []}, target=None)], 50)
    assert [row.step for row in found] == [0]
    assert math.isnan(found[0].values["a"][KL].mean)


def test_csv_has_a_line_for_every_arm_seed_and_row() -> None:
    arms = [ArmRows(label=label, runs={s: rows([1.0 + s] * 20) for s in (0, 1)}, target=None) for label in "ab"]
    lines = csv_rows(arms, 10)
    assert len(lines) == 2 * 2 * 3
    assert {"step": 20, "arm": "b", "seed": 1, KL: 2.0, REWARD: 2.0} in lines
