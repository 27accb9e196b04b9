"""What a run is told at its end: estimated beside measured, of its own rows and lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import klimb
from klimb.cli.summary import show_summary
from klimb.config.load import with_overrides
from klimb.config.schema import RunConfig
from klimb.launch import RunResult
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

Finished = tuple[RunConfig, RunResult]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("outlook")
    write_inputs(folder / "inputs")
    model = build_tiny_model(folder / "model")
    config = tiny_config(model, folder / "inputs", folder / "runs", **{"training.total_episodes": 24})
    return config, klimb.train(config)


def test_peaks_and_seconds_are_those_of_the_log(finished: Finished) -> None:
    _, result = finished
    logged = [row for row in rows(result.folder, volatile=True) if row["step"] > 0]
    assert len(logged) == 3
    assert result.outlook is not None
    assert set(result.outlook.peaks) == {"rollout", "score", "update"}
    for phase, peak in result.outlook.peaks.items():
        assert peak == max(row[f"memory/{phase}_peak"] for row in logged[:2])
        assert f"memory/{phase}_peak" not in logged[2]
    for phase in ("rollout", "score", "update"):
        later = sorted(row[f"time/{phase}"] for row in logged[1:])
        assert later[0] <= result.outlook.seconds[phase] <= later[-1]


def test_only_steps_of_this_start_are_measured(finished: Finished, tmp_path: Path) -> None:
    """Others may be those of another micro-batch, or of more ranks."""
    config, _ = finished
    first = with_overrides(config, [f"run.dir={tmp_path}", "training.total_episodes=24"])
    assert klimb.train(first).outlook is not None
    assert klimb.train(first).outlook is None
    again = klimb.train(with_overrides(first, ["training.total_episodes=32"]))
    last = rows(again.folder, volatile=True)[-1]
    assert again.outlook is not None
    assert last["step"] == 4
    assert again.outlook.peaks["update"] == last["memory/update_peak"]
    assert again.outlook.seconds["update"] == last["time/update"]


def test_it_is_estimated_for_the_models_and_lengths_of_the_run(finished: Finished) -> None:
    config, result = finished
    assert result.outlook is not None
    shape = json.loads((Path(config.actor_rollout_ref.model_path) / "config.json").read_text())
    block = 4 * shape["hidden_size"] ** 2 + 3 * shape["hidden_size"] * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * block + shape["hidden_size"] * shape["vocab_size"]
    for peak in result.outlook.forecast.peaks:
        assert peak.parts["weights"] == 4 * 3 * weights  # actor, reference and critic, embeddings tied
    assert set(result.outlook.forecast.seconds) == {"rollout", "score", "update"}


def test_the_summary_prints_them_side_by_side(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    config, result = finished
    show_summary(result, config)
    text = capsys.readouterr().out
    assert "memory and time of a step, measured beside estimated (docs/plan.md):" in text
    assert result.outlook is not None
    for phase, peak in result.outlook.peaks.items():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [phase]]
        assert line.split()[1] == f"{peak / 2**20:,.0f}"
        assert len(line.split()) == 7
    show_summary(replace(result, outlook=None), config)
    assert "measured beside estimated" not in capsys.readouterr().out
