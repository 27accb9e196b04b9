"""Which folder a run gets, and what the public functions refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import klimb
from klimb.errors import CheckpointError, ConfigError
from klimb.launch import default_name, place, summarise
from klimb.snapshot import State
from tests.tiny_runs import build_tiny_model, tiny_config, write_inputs


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("launch")
    write_inputs(folder / "inputs")
    return build_tiny_model(folder / "model"), folder / "inputs"


def test_the_same_numbers_find_the_same_folder(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base = tiny_config(*parts, tmp_path / "runs", **{"run.name": None})
    name = default_name(base, "recipe")
    assert name.startswith("recipe-explicit-")
    quiet = tiny_config(*parts, tmp_path / "runs", **{"run.name": None, "logging.samples_per_phase": 1})
    assert default_name(quiet, "recipe") == name
    for change in ({"training.lr": 2e-3}, {"training.seed": 1}, {"eval.max_prompts": 3}):
        assert default_name(tiny_config(*parts, tmp_path / "runs", **{"run.name": None}, **change), "recipe") != name
    cached = tiny_config(*parts, tmp_path / "runs", **{"run.name": None, "algorithm.use_pf_ppo": False})
    assert default_name(cached, "recipe").startswith("recipe-cached-")
    assert place(base, "recipe") == (tmp_path / "runs" / name, None)


def test_never_takes_a_free_folder(parts: tuple[Path, Path], tmp_path: Path) -> None:
    config = tiny_config(*parts, tmp_path / "runs", **{"training.resume": "never"})
    assert place(config, "r") == (tmp_path / "runs" / "run", None)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run-2").mkdir()
    assert place(config, "r") == (tmp_path / "runs" / "run-3", None)


def test_a_folder_that_cannot_be_made_is_told(parts: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = tiny_config(*parts, tmp_path / "file", **{"training.total_episodes": 8})
    with pytest.raises(ConfigError, match=r"run\.dir: .*file/run cannot be made \(Not a directory\)"):
        klimb.train(config)


def test_what_was_not_measured_has_no_after(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """Neither a run that was stopped before its next evaluation, nor one that begins without one."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": 0, "eval/reward": 0.25}, {"step": 1}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stopped = summarise(folder, State(step=1, episodes=8), 16)
    assert (stopped.before, stopped.after) == ({"eval/reward": 0.25}, {})
    config = tiny_config(*parts, tmp_path / "runs", **{"training.total_episodes": 8, "eval.before_training": False})
    assert not klimb.train(config).before


def test_a_path_to_resume_from_must_be_a_whole_checkpoint(parts: tuple[Path, Path], tmp_path: Path) -> None:
    config = tiny_config(*parts, tmp_path / "runs", **{"training.resume": str(tmp_path / "step-000001")})
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        place(config, "r")


def test_evaluate_scores_a_model_as_the_run_did(parts: tuple[Path, Path], tmp_path: Path) -> None:
    config = tiny_config(*parts, tmp_path / "runs", **{"training.total_episodes": 8})
    result = klimb.train(config)
    start = klimb.evaluate(config)
    end = klimb.evaluate(config, result.folder / "checkpoints" / "step-000001" / "actor")
    assert start.metrics == dict(result.before)
    assert end.metrics == dict(result.after)


def test_evaluate_without_held_out_prompts_is_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_files is empty"):
        klimb.evaluate(tiny_config(*parts, tmp_path / "runs", **{"data.eval_files": []}))


def test_a_prompt_and_response_over_the_models_limit_are_refused_at_start(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    """Case DT-02's last part: the limit of the tiny model is 128."""
    with pytest.raises(ConfigError, match="128"):
        klimb.train(tiny_config(*parts, tmp_path / "runs", **{"actor_rollout_ref.max_tokens": 120}))
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()
