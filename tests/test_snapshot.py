"""What a checkpoint tells, and what it warns of when it is read elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import klimb
from klimb import checkpoint
from klimb.errors import CheckpointError
from klimb.snapshot import read_record
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshot")
    write_inputs(folder / "inputs")
    config = tiny_config(build_tiny_model(folder / "model"), folder / "inputs", folder / "runs")
    return klimb.train(config).folder


def record_of(run: Path, step: int) -> dict[str, Any]:
    return read_record(run / "checkpoints" / checkpoint.checkpoint_name(step))


def test_the_state_says_how_the_run_stood(run: Path) -> None:
    record, row = record_of(run, 6), rows(run)[6]
    assert record["state"]["step"] == 6
    assert record["state"]["episodes"] == 48
    assert record["posture"] == "explicit"
    assert record["optimizer_steps"] == {"actor": 12, "critic": 12}
    assert record["schedule_steps"] == 12
    for key in ("kl/k1", "kl/k3", "kl/coef", "advantage/mean", "advantage/std", "reward/mean", "reward/std"):
        assert record["metrics"][key] == row[key]
    # The coefficient of the phase is the one it was trained with; the controller has moved on since.
    assert record["controller"]["coef"] != row["kl/coef"]
    assert record["log_bytes"]["metrics.jsonl"] == (run / "metrics.jsonl").stat().st_size
    assert record["config_hash"] == record_of(run, 5)["config_hash"]
    assert len(record["defaults_hash"]) == 64


def test_no_file_of_a_checkpoint_needs_unpickling(run: Path) -> None:
    place = run / "checkpoints" / checkpoint.checkpoint_name(6)
    suffixes = {path.suffix for path in place.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jinja"}


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        read_record(tmp_path)


def test_other_versions_and_thread_counts_are_warned_of(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = run / "checkpoints" / checkpoint.checkpoint_name(6)
    record = json.loads((place / "state.json").read_text())
    record["versions"]["torch"], record["threads"] = "1.0", 96
    (place / "state.json").write_text(json.dumps(record))
    manifest = json.loads((place / "manifest.json").read_text())
    del manifest["files"]["state.json"]
    (place / "manifest.json").write_text(json.dumps(manifest))
    klimb.train(klimb.RunConfig.load(run.parent.parent / "runs.yaml", ["training.total_episodes=56"]))
    # Lines on a pipe may be folded.
    text = " ".join(capsys.readouterr().out.split())
    assert "written with torch 1.0" in text
    assert "written with 96 threads" in text
    assert "made for 12 optimizer steps, now it is 14" in text
    assert [row["step"] for row in rows(run)] == list(range(8))
