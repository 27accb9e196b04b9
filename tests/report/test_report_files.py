"""Run folders in every state."""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path

import pytest

from klimb.errors import KlimbError
from klimb.report.files import fingerprint, read_run
from tests.report.folders import line, rows_of, sample, write_run


def test_a_finished_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", rows_of(20), [sample(1)]))
    assert (run.state, run.name, len(run.rows), len(run.samples), run.notes) == ("finished", "tidy", 21, 1, [])


def test_a_run_by_epochs_is_finished_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", rows_of(20), episodes=10**9)
    assert read_run(folder).state == "stopped"
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("total_epochs: null", "total_epochs: 0.064"))
    assert read_run(folder).state == "finished"


def test_a_run_still_writing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", rows_of(20), episodes=9999)
    assert read_run(folder).state == "stopped"
    before = fingerprint(folder)
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
        assert fingerprint(folder) != before
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # reading took nothing away
    assert read_run(folder).state == "stopped"


def test_a_run_that_died_in_the_middle_of_a_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", rows_of(5), [sample(1), sample(2, response="grün")], episodes=640)
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = folder / name
        path.write_bytes(path.read_bytes()[: -1 - len(line({})) - 30])
    cut = (folder / "samples.jsonl").read_bytes()
    (folder / "samples.jsonl").write_bytes(cut[: cut.rindex("ü".encode()) + 1])  # half a character
    run = read_run(folder)
    assert run.state == "stopped"
    assert (len(run.rows), len(run.samples)) == (5, 1)
    assert run.notes == [f"{name}.jsonl: the last line is cut off and was left out" for name in ("metrics", "samples")]


def test_an_empty_run_folder(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", []))
    assert (run.state, run.rows, run.samples, run.best) == ("empty", [], [], None)


def test_a_folder_with_metrics_only(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line({"step": 1, "reward/mean": 1}))
    run = read_run(tmp_path)
    assert (run.state, run.name) == ("ended", tmp_path.name), "neither finished nor stopped early can be told"
    assert run.notes == ["config.yaml: missing, so target, posture and length of the run are not known"]


@pytest.mark.parametrize("text", ["a: [", "- 1", "\x00"])
def test_a_damaged_config_is_told(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "r", rows_of(3))
    (folder / "config.yaml").write_text(text)
    run = read_run(folder)
    assert run.config == {}
    assert "not readable as YAML" in run.notes[0]


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KlimbError, match="no such run folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(KlimbError, match=r"not a run folder: no config.yaml, metrics.jsonl or samples.jsonl there$"):
        read_run(tmp_path)
    write_run(tmp_path / "one", rows_of(1))
    with pytest.raises(KlimbError, match=r"Run folders inside it: one$"):
        read_run(tmp_path)
    with pytest.raises(KlimbError, match="give the run folder"):
        read_run(tmp_path / "one" / "config.yaml")


def test_values_that_are_not_finite_come_back(tmp_path: Path) -> None:
    rows = [{"step": 2, "a": "inf"}, {"step": 1, "a": "nan", "note": "text"}, {"a": 1}]
    run = read_run(write_run(tmp_path / "r", [{"episodes": 1, **row} for row in rows], episodes=5))
    assert [row["step"] for row in run.rows] == [1, 2]
    assert math.isnan(run.rows[0]["a"])
    assert run.rows[1]["a"] == math.inf
    assert "note" not in run.rows[0]
    assert run.notes == ["metrics.jsonl: 1 line is not readable and left out"]


def test_interventions_and_the_best_checkpoint(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", rows_of(3))
    (folder / "interventions.jsonl").write_text(line({"step": 2, "finding": "kl_explosion"}) + line({"finding": 1}))
    for step, state in ((2, {"best_step": 2, "best_value": 0.5}), (3, {"best_step": 2, "best_value": 0.5})):
        place = folder / "checkpoints" / f"step-{step:06d}"
        place.mkdir(parents=True)
        (place / "state.json").write_text(json.dumps({"state": state}))
    (folder / "checkpoints" / "step-000009").mkdir()
    run = read_run(folder)
    assert [row["step"] for row in run.interventions] == [2]
    assert run.best == (2, 0.5, True)


def test_settings_are_those_that_the_guard_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", rows_of(3))
    made = {"step": 2, "back_to": 0, "overrides": ["training.lr=1e-05", "algorithm.ppo_epochs=1", "odd", "run.name=x"]}
    (folder / "interventions.jsonl").write_text(line(made) + line(made | {"overrides": ["training.lr=2.5e-06"]}))
    run = read_run(folder)
    assert run.settings["training"]["lr"] == 2.5e-6
    assert run.settings["algorithm"]["ppo_epochs"] == 1
    assert "lr" not in run.config["training"]
