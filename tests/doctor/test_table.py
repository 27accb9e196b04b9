from __future__ import annotations

import math

import pytest

from klimb.doctor.table import HEAD, TAIL, Recorder, Table


def test_series_hold_only_the_steps_that_had_them() -> None:
    table = Table.of([{"step": 1, "a": 1.0}, {"step": 2, "b": 5.0}, {"step": 3, "a": 3.0}])
    a = table.curve("a")
    assert a is not None
    assert a.steps.tolist() == [1, 3]
    assert a.values.tolist() == [1.0, 3.0]
    assert table.curve("c") is None
    assert table.curve("c", "b") is not None
    assert table.last == 3


def test_a_run_that_went_back_starts_anew_from_there() -> None:
    table = Table.of([{"step": s, "a": float(s)} for s in (1, 2, 3, 4)] + [{"step": 3, "a": 30.0}])
    a = table.curve("a")
    assert a is not None
    assert a.steps.tolist() == [1, 2, 3]
    assert a.values.tolist() == [1.0, 2.0, 30.0]
    assert table.last == 3


def test_going_back_forgets_series_that_are_not_logged_again() -> None:
    table = Table.of([{"step": 1, "a": 1.0}, {"step": 5, "b": 9.0}, {"step": 2, "a": 2.0}])
    assert table.curve("b") is None
    assert table.last == 2


def test_a_bounded_recorder_keeps_the_start_and_the_end() -> None:
    recorder = Recorder(bounded=True)
    for step in range(5000):
        recorder.add({"step": step, "a": float(step)})
    a = recorder.table().curve("a")
    assert a is not None
    assert a.steps[:HEAD].tolist() == list(range(HEAD))
    assert a.steps[-TAIL:].tolist() == list(range(5000 - TAIL, 5000))
    assert len(a) <= HEAD + 2 * TAIL


def test_what_is_not_finite_stays_in_the_series() -> None:
    a = Table.of([{"step": 1, "a": math.nan}, {"step": 2, "a": math.inf}, {"step": 3, "a": 1.0}]).curve("a")
    assert a is not None
    assert len(a) == 3
    assert a.finite.steps.tolist() == [3]


@pytest.mark.parametrize(("counts", "expected"), [((0, 24, 48, 72), 24.0), ((0,), None), ((5, 5, 5), None)])
def test_episodes_of_a_step(counts: tuple[int, ...], expected: float | None) -> None:
    rows = [{"step": i, "episodes": float(n)} for i, n in enumerate(counts)]
    assert Table.of(rows).episodes == expected
