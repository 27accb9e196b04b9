"""The loop on a tiny model with real parts: both postures, estimators, resume, evaluation that disturbs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import klimb
from klimb import checkpoint
from klimb.config.schema import RunConfig
from klimb.errors import CheckpointError, RewardError
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    write_inputs(folder / "inputs")
    return build_tiny_model(folder / "model"), folder / "inputs"


def config_of(parts: tuple[Path, Path], tmp_path: Path, **changes: Any) -> RunConfig:
    return tiny_config(*parts, tmp_path / "runs", **changes)


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    place = folder / "checkpoints" / checkpoint.checkpoint_name(step)
    both = {f"actor.{k}": v for k, v in load_file(place / "actor" / "model.safetensors").items()}
    if (place / "critic").is_dir():
        both |= {f"critic.{k}": v for k, v in load_file(place / "critic" / "model.safetensors").items()}
        both |= {f"head.{k}": v for k, v in load_file(place / "critic" / "value_head.safetensors").items()}
    return both


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


ALGORITHMS = {
    "ppo-explicit": {},
    "ppo-cached": {"algorithm.use_pf_ppo": False},
    "grpo-explicit": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollouts_per_prompt": 4},
    "rloo-cached": {
        "algorithm.adv_estimator": "rloo",
        "algorithm.use_pf_ppo": False,
        "actor_rollout_ref.rollouts_per_prompt": 4,
    },
}


@pytest.mark.parametrize("changes", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_a_run_learns_and_logs_what_its_posture_promises(
    parts: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = config_of(
        parts,
        tmp_path,
        **changes,
        **{"training.total_episodes": 320, "training.lr": 3e-3, "algorithm.kl_ctrl.init_kl_coef": 0.001},
    )
    result = klimb.train(config)
    table = rows(result.folder)[1:]
    assert result.finished
    assert result.episodes == 320
    first, last = table[:8], table[-8:]
    assert sum(r["reward/mean"] for r in last) > sum(r["reward/mean"] for r in first) + 8 * 0.08
    explicit = config.algorithm.use_pf_ppo
    for row in table:
        assert (row["policy/old_forwards"] > 0) == explicit
        assert row["mismatch/max_log_ratio"] < 1e-4
        assert row["policy/first_ratio_dev_max"] <= (1e-6 if explicit else 2e-4)
        assert ("kl/k3_trainer" in row) == (not explicit)
        assert row["policy/skipped_steps"] == 0
        assert ("value/loss" in row) == config.needs_critic
    if explicit:
        assert table[-1]["kl/k3"] > 0
        assert "kl/target" in table[0]
    else:
        assert "policy/kl_loss" not in table[0]
        assert all(row["kl/coef"] == 0.001 for row in table)


def test_case_LP_02_dropout_in_the_config_leaves_the_first_ratio_at_one(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "dropout", dropout=0.5)
    config = tiny_config(model, parts[1], tmp_path / "runs", **{"training.total_episodes": 16})
    result = klimb.train(config)
    for row in rows(result.folder)[1:]:
        assert row["policy/first_ratio_dev_max"] <= 1e-6


def test_stopping_and_resuming_changes_nothing(parts: tuple[Path, Path], tmp_path: Path) -> None:
    whole = klimb.train(config_of(parts, tmp_path, **{"run.name": "whole"}))
    halves = {"run.name": "halves", "training.total_episodes": 48}
    klimb.train(config_of(parts, tmp_path, **halves))
    folder = tmp_path / "runs" / "halves"
    for step in (6, 5, 4):  # as if the run had been killed after step 3, with later log lines written
        checkpoint_folder = folder / "checkpoints" / checkpoint.checkpoint_name(step)
        if checkpoint_folder.exists():
            (checkpoint_folder / "manifest.json").unlink()
    klimb.train(config_of(parts, tmp_path, **halves))
    assert same(weights(folder, 6), weights(whole.folder, 6))
    assert rows(folder) == rows(whole.folder)
    assert (folder / "samples.jsonl").read_bytes() == (whole.folder / "samples.jsonl").read_bytes()


def test_case_CR_01_resume_at_the_end_of_an_epoch_goes_on(parts: tuple[Path, Path], tmp_path: Path) -> None:
    write_inputs(tmp_path / "eight", num_prompts=8)
    changes: dict[str, Any] = {
        "actor_rollout_ref.rollout_batch_size": 4,
        "training.total_epochs": 2,
        "training.save_freq": 4,
        "training.keep_checkpoints": 10,
        "logging.samples_per_phase": 4,
    }

    def run(name: str) -> Path:
        config = tiny_config(parts[0], tmp_path / "eight", tmp_path / "runs", **changes, **{"run.name": name})
        return klimb.train(config).folder

    whole, resumed = run("whole"), run("resumed")
    for step in (3, 4):
        (resumed / "checkpoints" / checkpoint.checkpoint_name(step) / "manifest.json").unlink()
    assert run("resumed") == resumed
    assert [row["step"] for row in rows(resumed)] == [0, 1, 2, 3, 4]
    samples = [json.loads(line) for line in (resumed / "samples.jsonl").read_text().splitlines()]
    after = [s["row"] for s in samples if s["kind"] == "train" and s["step"] in (3, 4)]
    assert sorted(after) == list(range(8))
    assert same(weights(resumed, 4), weights(whole, 4))


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"training.total_episodes": 28, "training.save_freq": 12}, [3, 6, 7]),
        ({"training.total_episodes": 28, "training.save_freq": 28}, [7]),
        ({"training.total_episodes": 8, "training.save_freq": 400}, [2]),
        ({"training.total_epochs": 2, "training.total_episodes": 40, "training.save_freq": 16}, [4, 6]),
    ],
)
def test_case_CR_02_every_due_step_and_the_last_are_saved_once(
    parts: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], saved: list[int]
) -> None:
    always = {"actor_rollout_ref.rollout_batch_size": 4, "training.keep_checkpoints": 50, "data.eval_files": []}
    result = klimb.train(config_of(parts, tmp_path, **always, **changes))
    assert [checkpoint.step_of(p) for p in checkpoint.listed(result.folder / "checkpoints")] == saved


def test_case_RN_01_how_often_one_evaluates_changes_nothing(parts: tuple[Path, Path], tmp_path: Path) -> None:
    results = []
    for name, changes in {
        "every": {"eval.every_episodes": 8},
        "rarely": {"eval.every_episodes": 40},
        "never": {"data.eval_files": []},
    }.items():
        config = config_of(
            parts,
            tmp_path,
            **changes,
            **{"run.name": name, "training.total_episodes": 40, "training.keep_checkpoints": 9},
        )
        results.append(klimb.train(config).folder)
    texts = [
        [json.loads(x)["response"] for x in (f / "samples.jsonl").read_text().splitlines() if '"kind": "train"' in x]
        for f in results
    ]
    for folder, text in zip(results[1:], texts[1:], strict=True):
        assert same(weights(folder, 5), weights(results[0], 5))
        assert text == texts[0]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"algorithm.use_pf_ppo": False}, "algorithm.use_pf_ppo"),
        ({"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollouts_per_prompt": 4}, "algorithm.adv_estimator"),
        ({"training.seed": 1}, "training.seed"),
    ],
)
def test_a_run_of_another_kind_is_not_continued(
    parts: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    klimb.train(config_of(parts, tmp_path, **{"training.total_episodes": 8}))
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=key) as error:
        klimb.train(config_of(parts, tmp_path, **changes))
    assert "run.name=" in str(error.value)
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == before


def test_a_longer_run_goes_on_and_an_explicit_path_goes_back(parts: tuple[Path, Path], tmp_path: Path) -> None:
    short = klimb.train(config_of(parts, tmp_path, **{"training.total_episodes": 24, "training.keep_checkpoints": 9}))
    longer = klimb.train(config_of(parts, tmp_path, **{"training.total_episodes": 40}))
    assert longer.folder == short.folder
    assert [row["step"] for row in rows(longer.folder)] == [0, 1, 2, 3, 4, 5]
    second = short.folder / "checkpoints" / checkpoint.checkpoint_name(2)
    back = klimb.train(config_of(parts, tmp_path, **{"training.total_episodes": 24, "training.resume": str(second)}))
    assert back.folder == short.folder
    assert [row["step"] for row in rows(back.folder)] == [0, 1, 2, 3]
    assert list((short.folder / "checkpoints").glob("*.abandoned-1"))


def test_critic_warmup_leaves_the_policy_alone(parts: tuple[Path, Path], tmp_path: Path) -> None:
    config = config_of(parts, tmp_path, **{"critic.warmup_phases": 1, "training.total_episodes": 16})
    folder = klimb.train(config).folder
    start = load_file(parts[0] / "model.safetensors")
    after = load_file(folder / "checkpoints" / checkpoint.checkpoint_name(1) / "actor" / "model.safetensors")
    assert same(start, after)
    assert "value/loss" in rows(folder)[1]
    assert "policy/loss" not in rows(folder)[1]
    assert "policy/loss" in rows(folder)[2]


def test_every_reward_failing_stops_the_run_with_a_reason(parts: tuple[Path, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def reward(prompt, response, answer):\n    raise ValueError('broken on purpose')\n")
    config = config_of(
        parts, tmp_path, **{"reward_model.functions": [{"name": f"{bad}:reward"}], "data.eval_files": []}
    )
    with pytest.raises(RewardError, match="broken on purpose"):
        klimb.train(config)
