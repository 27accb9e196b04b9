"""Header and key numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from klimb.report.charts import Mark
from klimb.report.files import read_run
from klimb.report.overview import facts, finding_marks, intervention_marks, posture, tiles
from tests.report.folders import rows_of, write_run


def tile_of(tmp_path: Path, rows: list[dict[str, Any]], label: str) -> dict[str, Any] | None:
    found = tiles(read_run(write_run(tmp_path / "r", rows)))
    return next((tile for tile in found if tile["label"] == label), None)


def test_before_and_after(tmp_path: Path) -> None:
    rows = [
        {"step": i, "eval/accuracy": a, "eval/reward": r} for i, a, r in ((0, 0.25, 0.5), (1, "nan", 1), (2, 1, 0.25))
    ]
    rows = [{**row, "episodes": 1} for row in rows]
    accuracy = tile_of(tmp_path, rows, "held-out accuracy")
    assert accuracy is not None
    assert (accuracy["value"], accuracy["detail"], accuracy["tone"]) == ("25.0% → 100.0%", "+75.0 points", "good")
    reward = tile_of(tmp_path, rows, "held-out reward")
    assert reward is not None
    assert (reward["value"], reward["detail"], reward["tone"]) == ("0.500 → 0.250", "-0.250", "bad")
    once = tile_of(tmp_path, rows[:1], "held-out accuracy")
    assert once is not None
    assert (once["value"], once["detail"]) == ("25.0%", "one measurement so far")


def test_the_kl_of_the_second_half(tmp_path: Path) -> None:
    rows = [{"step": i, "episodes": i, "kl/k3": v, "kl/target": 0.02} for i, v in enumerate((9, 9, 0.03, 0.05), 1)]
    found = tile_of(tmp_path, rows, "KL")
    assert found is not None
    assert (found["value"], found["detail"], found["tone"]) == ("0.0400", "second half, 200% of the target 0.02", "bad")
    assert tile_of(tmp_path, [{"step": 1, "episodes": 1}], "KL") is None


def test_the_coefficient_and_the_time(tmp_path: Path) -> None:
    rows = [{"step": i, "episodes": i, "kl/coef": 0.1 * i, "time/step": 60.0 * i} for i in (1, 2, 3)]
    found = tile_of(tmp_path, rows, "KL coefficient")
    assert found is not None
    assert (found["value"], found["detail"]) == ("0.3", "began at 0.1")
    time = tile_of(tmp_path, rows, "time per step")
    assert time is not None
    assert time["value"] == "2m00s"


def test_trends_are_short_and_end_at_the_end(tmp_path: Path) -> None:
    rows = [{"step": i, "episodes": i, "reward/mean": float(i)} for i in range(1000)]
    found = tile_of(tmp_path, rows, "training reward")
    assert found is not None
    assert len(found["trend"]) <= 61
    assert (found["trend"][0], found["trend"][-1]) == (0, 999)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({}, ""),
        ({"use_pf_ppo": True}, "Explicit posture: old log-probabilities are computed again after sampling; no KL."),
        (
            {"use_pf_ppo": False, "use_kl_in_reward": True, "kl_ctrl": {"type": "fixed"}},
            "Cached posture: the sampler's log-probabilities are the old ones; "
            "KL in the reward with a coefficient that is fixed.",
        ),
    ],
)
def test_the_posture_in_words(algorithm: dict[str, Any], words: str) -> None:
    assert posture({"algorithm": algorithm}) == words


def test_facts_of_an_empty_run_say_what_is_known(tmp_path: Path) -> None:
    assert facts(read_run(write_run(tmp_path / "r", []))) == [
        ("model", "playground:sft"),
        ("data", "task:arithmetic"),
        ("algorithm", "gae, clip loss"),
    ]
    found = dict(facts(read_run(write_run(tmp_path / "s", rows_of(5), episodes=640))))
    assert (found["steps"], found["episodes"]) == ("5", "320 of 640")


def test_interventions_become_marks() -> None:
    whole = {"step": 9, "back_to": 4, "finding": "kl_explosion", "overrides": ["training.lr=1e-5", "a.b=1"]}
    rows = [whole, {"step": 5, "back_to": 1}, {"step": 5}, {"step": "x", "back_to": 1}]
    assert intervention_marks(rows) == [
        Mark(step=4, label="rolled back from step 9 for kl_explosion: training.lr=1e-5 a.b=1", severity="action"),
        Mark(step=1, label="rolled back from step 5 for None: ", severity="action"),
    ]


def test_what_the_doctor_finds_becomes_a_mark(tmp_path: Path) -> None:
    rows = rows_of(40)
    for row in rows[21:]:
        row["kl/k3"] = 2.0
    marks = finding_marks(read_run(write_run(tmp_path / "s", rows)))
    (mark,) = [mark for mark in marks if "kl_explosion" in mark.label]
    assert (mark.step, mark.end, mark.severity) == (21, 40, "error")
    assert "100 times its target 0.02" in mark.label
    assert not [
        mark for mark in finding_marks(read_run(write_run(tmp_path / "t", rows_of(40)))) if mark.severity == "error"
    ]
