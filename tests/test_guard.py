"""Alarms in whole runs on a tiny model: warned of, stopped at, rolled back from, and resumed."""

from __future__ import annotations

import json
import os
import pydoc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import klimb
from klimb import checkpoint, loop
from klimb.config.load import load_config
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.errors import CheckpointError
from klimb.launch import RunResult
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

BREAKS: dict[str, Any] = {
    "training.lr": 0.02,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "training.total_episodes": 112,
    "training.save_freq": 24,
    "diagnostics.on_alarm": "rollback",
    "diagnostics.healthy_every_phases": 2,
    "critic.lr": 1e-4,
}
POSTURES = pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "cached"])


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    write_inputs(folder / "inputs", 40)
    return build_tiny_model(folder / "model"), folder / "inputs"


def config_of(parts: tuple[Path, Path], place: Path, **changes: Any) -> RunConfig:
    return tiny_config(*parts, place / "runs", **changes)


def run(parts: tuple[Path, Path], place: Path, **changes: Any) -> RunResult:
    return klimb.train(config_of(parts, place, **changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest, _ = checkpoint.newest(folder / "checkpoints")
    assert newest is not None
    return load_file(newest / "actor" / "model.safetensors")


def interventions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "interventions.jsonl").read_text().splitlines()]


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_that_never_alarms_is_bit_identical_with_and_without_the_guard(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    calm = {"training.lr": 1e-5}
    plain = run(parts, tmp_path / "a", **calm)
    guarded = run(
        parts, tmp_path / "b", **calm, **{"diagnostics.on_alarm": "rollback", "diagnostics.healthy_every_phases": 1}
    )
    assert guarded.finished
    assert guarded.interventions == ()
    assert rows(plain.folder) == rows(guarded.folder)
    assert same_weights(plain.folder, guarded.folder)
    assert (plain.folder / "samples.jsonl").read_bytes() == (guarded.folder / "samples.jsonl").read_bytes()
    assert not (guarded.folder / "healthy").exists()
    assert not (guarded.folder / "interventions.jsonl").exists()


@POSTURES
def test_a_run_that_breaks_is_saved(parts: tuple[Path, Path], tmp_path: Path, explicit: bool) -> None:
    result = run(parts, tmp_path, **BREAKS, **{"algorithm.use_pf_ppo": explicit})
    assert result.finished
    made = interventions(result.folder)
    assert 1 <= len(made) <= 4
    assert made[0]["overrides"] == ["training.lr=0.005"]
    assert [entry["number"] for entry in made] == list(range(1, len(made) + 1))
    assert len(result.interventions) == len(made)
    table = rows(result.folder)
    steps = [row["step"] for row in table]
    assert steps == list(range(15))
    assert table[1]["lr"] == pytest.approx(0.02 / 4 ** sum(e["back_to"] == 0 for e in made))
    files = [result.folder / f"metrics.abandoned-{entry['number']}.jsonl" for entry in made]
    abandoned = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(abandoned) == sum(entry["step"] - entry["back_to"] for entry in made)
    assert max(row["kl/k3"] for row in abandoned) > 0.1
    base = load_config(result.folder / "config.yaml").config
    assert resolve(base).lr == 0.02


@pytest.mark.slow
def test_the_prompts_that_broke_it_are_skipped(parts: tuple[Path, Path], tmp_path: Path) -> None:
    settings = BREAKS | {"data.shuffle": False, "logging.samples_per_phase": 8, "diagnostics.max_interventions": 9}
    result = run(parts, tmp_path, **settings)
    first = interventions(result.folder)[0]
    samples = [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]
    after = [s for s in samples if s["kind"] == "train" and s["step"] == first["back_to"] + 1]
    made = interventions(result.folder)
    drawn = sum(8 * (entry["step"] - entry["back_to"]) for entry in made if entry["back_to"] == first["back_to"])
    assert [s["row"] for s in after] == [(8 * first["back_to"] + drawn + i) % 40 for i in range(8)]


@pytest.mark.slow
def test_resuming_after_an_intervention_is_bit_exact(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(parts, tmp_path / "a", **BREAKS)
    turns = len(rows(whole.folder)) - 1 + sum(e["step"] - e["back_to"] for e in interventions(whole.folder))
    turn: Callable[..., Any] = loop._turn
    for stop_at in range(2, turns, 3):
        place, calls = tmp_path / f"b{stop_at}", 0

        def killed(*args: Any, at: int = stop_at) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise RuntimeError("killed")
            return turn(*args)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "_turn", killed)
            with pytest.raises(RuntimeError, match="killed"):
                run(parts, place, **BREAKS)
        again = run(parts, place, **BREAKS)
        assert again.finished
        assert rows(again.folder) == rows(whole.folder)
        assert same_weights(again.folder, whole.folder)
        assert interventions(again.folder) == interventions(whole.folder)


def test_after_the_last_intervention_the_run_stops_with_its_findings(parts: tuple[Path, Path], tmp_path: Path) -> None:
    result = run(parts, tmp_path, **BREAKS | {"diagnostics.max_interventions": 1, "training.lr": 1.0})
    assert not result.finished
    assert result.alarms
    assert len(interventions(result.folder)) == 1
    newest, _ = checkpoint.newest(result.folder / "checkpoints")
    assert newest is not None
    assert (checkpoint.step_of(newest) or 0) < result.step


def test_stop_ends_at_the_alarm_and_saves(parts: tuple[Path, Path], tmp_path: Path) -> None:
    result = run(parts, tmp_path, **BREAKS | {"diagnostics.on_alarm": "stop"})
    assert not result.finished
    assert result.alarms
    newest, _ = checkpoint.newest(result.folder / "checkpoints")
    assert newest is not None
    assert checkpoint.step_of(newest) == result.step < 14


def test_warn_goes_on_and_says_so(parts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(parts, tmp_path, **BREAKS | {"diagnostics.on_alarm": "warn"})
    assert result.finished
    assert result.alarms == ()
    out = capsys.readouterr().out
    assert out.count("ALARM kl_explosion") + out.count("ALARM ratio_spikes") >= 1
    assert "First to try: training." in out


def test_an_alarm_that_no_rung_can_cure_does_not_roll_back(parts: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text("def reward(prompt, response, answer):\n    return 0.7\n")
    settings = BREAKS | {
        "training.lr": 1e-6,
        "reward_model.functions": [{"name": f"{tmp_path / 'constant.py'}:reward"}],
    }
    result = run(parts, tmp_path, **settings)
    assert result.finished
    assert result.interventions == ()
    assert "reward_degenerate" in [f.code for f in klimb.diagnose(result.folder)]


def test_on_alarm_may_change_on_resume_and_the_rate_must_not_silently(
    parts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(parts, tmp_path, **BREAKS | {"diagnostics.on_alarm": "stop"})
    run(parts, tmp_path, **BREAKS | {"diagnostics.on_alarm": "warn"})
    assert "diagnostics.on_alarm was 'stop', goes on with 'warn'" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="use_pf_ppo"):
        run(parts, tmp_path, **BREAKS | {"algorithm.use_pf_ppo": False})


PLACES = ("klimb.guard.checkpoint.set_aside", "klimb.guard.checkpoint.write", "klimb.guard.forget")
PLACES += ("klimb.runlog.RunLog.set_aside", "klimb.runlog.RunLog.rewind", "klimb.guard.write_record")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_inside_the_rollback_changes_nothing(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, when: str
) -> None:
    """Whatever line it falls on, the run that resumes walks the same path."""
    whole = run(parts, tmp_path / "a", **BREAKS)
    assert whole.interventions
    inside, fired = False, False
    roll_back: Callable[..., Any] = loop.guard.roll_back

    def watched(*args: Any) -> Any:
        nonlocal inside
        inside = True
        return roll_back(*args)

    module, _, name = place.rpartition(".")
    owner: Any = pydoc.locate(module)
    real: Callable[..., Any] = getattr(owner, name)

    def killed(*args: Any) -> Any:
        nonlocal fired
        if not inside or fired:
            return real(*args)
        fired = True
        if when == "after":
            real(*args)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(loop.guard, "roll_back", watched)
        patch.setattr(owner, name, killed)
        with pytest.raises(RuntimeError, match="killed"):
            run(parts, tmp_path / "b", **BREAKS)
    again = run(parts, tmp_path / "b", **BREAKS)
    assert again.finished
    assert rows(again.folder) == rows(whole.folder)
    assert interventions(again.folder) == interventions(whole.folder)
    assert same_weights(again.folder, whole.folder)


@pytest.mark.slow
def test_a_checkpoint_made_by_ctrl_c_is_no_place_to_go_back_to(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(parts, tmp_path / "a", **BREAKS)
    first = interventions(whole.folder)[0]
    turn: Callable[..., Any] = loop._turn

    def interrupted(current: Any, state: Any, start: int) -> Any:
        done = turn(current, state, start)
        if state.step + 1 == max(1, first["first"]):
            os.kill(os.getpid(), signal.SIGINT)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_turn", interrupted)
        stopped = run(parts, tmp_path / "b", **BREAKS)
    assert not stopped.finished
    again = run(parts, tmp_path / "b", **BREAKS)
    assert interventions(again.folder) == interventions(whole.folder)
    assert rows(again.folder) == rows(whole.folder)


def test_an_alarm_in_the_last_step_is_no_finished_run(parts: tuple[Path, Path], tmp_path: Path) -> None:
    broken = BREAKS | {"training.total_episodes": 16, "diagnostics.max_interventions": 0, "training.lr": 1.0}
    result = run(parts, tmp_path, **broken)
    assert result.alarms
    assert not result.finished


def test_a_guard_that_is_switched_on_later_has_a_state_to_go_back_to(parts: tuple[Path, Path], tmp_path: Path) -> None:
    calm = BREAKS | {"training.lr": 1e-5, "training.total_episodes": 48, "diagnostics.on_alarm": "warn"}
    run(parts, tmp_path, **calm)
    result = run(parts, tmp_path, **BREAKS)
    assert result.interventions
    assert result.interventions[0].back_to == 6
