"""Rollout phases with greedy answers, filtering and the on-policy shortcut, in whole runs on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import klimb
from klimb import checkpoint, loop
from klimb.build import build_run, make_pool
from klimb.clock import Clock
from klimb.config.counts import count, skips_old_pass
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.console import Screen
from klimb.errors import ConfigError
from klimb.phase import Phase, play
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

GROUPS = {"actor_rollout_ref.rollouts_per_prompt": 4}
NO_EVAL = {"data.eval_files": []}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    write_inputs(folder / "inputs")
    return build_tiny_model(folder / "model"), folder / "inputs"


def config_of(parts: tuple[Path, Path], tmp_path: Path, **changes: Any) -> RunConfig:
    return tiny_config(*parts, tmp_path / "runs", **{**NO_EVAL, **changes})


def played(config: RunConfig, tmp_path: Path) -> Phase:
    with Screen() as screen, make_pool(config) as pool:
        run = build_run(config, tmp_path / "folder", screen, pool)
        return play(run, 8, 1, 3, Clock(torch.device("cpu")))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    place = folder / "checkpoints" / checkpoint.checkpoint_name(step) / "actor" / "model.safetensors"
    return load_file(place)


def share_of_digits(text: str) -> float:
    return sum(c.isdigit() for c in text) / (len(text) or 1)


def test_greedy_answers_are_those_of_temperature_zero_and_disturb_no_sample(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    remax = {"algorithm.adv_estimator": "remax", "actor_rollout_ref.rollouts_per_prompt": 2}
    phase = played(config_of(parts, tmp_path, **remax), tmp_path)
    plain = played(config_of(parts, tmp_path, **{**remax, "algorithm.adv_estimator": "reinforce_pp"}), tmp_path)
    assert [s.token_ids for s in phase.samples] == [s.token_ids for s in plain.samples]
    assert plain.batch.greedy_totals is None
    greedy = phase.batch.greedy_totals
    assert greedy is not None
    asked = {s.prompt.row: s.prompt for s in phase.samples}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(parts[0]), AutoTokenizer.from_pretrained(parts[0])
    for row, prompt in asked.items():
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            for _ in range(12):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
                if int(ids[0, -1]) == tokenizer.eos_token_id:
                    break
        text = tokenizer.decode(ids[0, len(prompt.token_ids) :], skip_special_tokens=True)
        mine = greedy[phase.batch.group == row]
        assert len(mine) == 2
        assert mine.tolist() == pytest.approx([share_of_digits(text)] * 2)
    assert phase.metrics["reward/greedy"] == pytest.approx(float(greedy.mean()))


def test_the_moments_learn_from_samples_and_not_from_greedy_answers(parts: tuple[Path, Path], tmp_path: Path) -> None:
    changes = {"reward_model.normalize": "running", "training.total_episodes": 16}
    for name in ("remax", "reinforce_pp"):
        klimb.train(config_of(parts, tmp_path, **changes, **{"algorithm.adv_estimator": name, "run.name": name}))
    states = [
        json.loads((tmp_path / "runs" / name / "checkpoints" / "step-000001" / "state.json").read_text())
        for name in ("remax", "reinforce_pp")
    ]
    assert states[0]["moments"] == states[1]["moments"]
    assert states[0]["moments"]["count"] == 8


def plan_says_skipped(config: RunConfig) -> bool:
    posture = resolve(config)
    return skips_old_pass(config, posture, count(config, posture))


ON_POLICY: dict[str, dict[str, Any]] = {
    "gae": {},
    "gae with entropy and value clip": {"algorithm.entropy_coef": 0.01, "critic.value_clip": 0.1},
    "grpo": {"algorithm.adv_estimator": "grpo", **GROUPS},
    "remax, sapo": {"algorithm.adv_estimator": "remax", "algorithm.policy_loss": "sapo"},
    "rloo, gspo": {"algorithm.adv_estimator": "rloo", "algorithm.policy_loss": "gspo", **GROUPS},
    "no KL": {"algorithm.use_kl_loss": False, "algorithm.use_kl_in_reward": False},
    "pi": {"algorithm.kl_ctrl.type": "pi"},
    "critic warm-up": {"critic.warmup_phases": 1},
    "several forwards a step": {"actor_rollout_ref.max_tokens_per_micro_batch": 40},
}


QUICK = ("gae", "rloo, gspo", "several forwards a step")


@pytest.mark.parametrize(
    "changes",
    [pytest.param(v, id=k, marks=() if k in QUICK else pytest.mark.slow) for k, v in ON_POLICY.items()],
)
def test_without_its_old_pass_an_on_policy_run_is_the_same_to_the_last_bit(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Weights, samples and every metric, but those that count the pass itself."""
    one_step = {"training.gradient_accumulation_steps": 4, "training.total_episodes": 32, **changes}
    config = config_of(parts, tmp_path, **one_step, **{"run.name": "short"})
    assert plan_says_skipped(config)
    short = klimb.train(config).folder
    monkeypatch.setattr(loop, "is_on_policy", lambda epochs, recipe: False)
    long = klimb.train(config_of(parts, tmp_path, **one_step, **{"run.name": "long"})).folder
    counters = ("policy/old_forwards", "policy/old_pass_skipped")
    warm_up = changes.get("critic.warmup_phases", 0)
    skipped = [[row[key] for key in counters] for row in rows(short)]
    assert skipped[warm_up:] == [[0, 1.0]] * (4 - warm_up)
    assert all(row["policy/old_forwards"] > 0 and row["policy/old_pass_skipped"] == 0.0 for row in rows(long))
    clean = [[{k: v for k, v in row.items() if k not in counters} for row in rows(folder)] for folder in (short, long)]
    assert clean[0] == clean[1]
    assert ("kl/k3" in clean[0][-1]) == (changes.get("algorithm.use_kl_loss") is not False)
    assert "mismatch/kl" in clean[0][-1]
    a, b = weights(short, 4), weights(long, 4)
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert not torch.equal(a["model.norm.weight"], weights(short, 2)["model.norm.weight"]), "it did train"
    assert (short / "samples.jsonl").read_bytes() == (long / "samples.jsonl").read_bytes()


READS_OLD: dict[str, dict[str, Any]] = {
    "two epochs": {"algorithm.ppo_epochs": 2},
    "two steps": {"training.gradient_accumulation_steps": 2},
    "KL in the reward": {"algorithm.use_kl_in_reward": True},
    "weights": {"algorithm.rollout_correction.weights": "token"},
    "rejection": {"algorithm.rollout_correction.reject": {"criterion": "token_veto", "lo": 0.1}},
    "filtration": {"algorithm.policy_filtration.strategy": "best_worst", **GROUPS},
    "exclusion": {"algorithm.truncated": "exclude"},
    "filtered groups": {"algorithm.filter_groups": True, **GROUPS},
}


@pytest.mark.parametrize("changes", READS_OLD.values(), ids=READS_OLD.keys())
def test_the_old_pass_is_made_where_something_reads_it(
    parts: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    one_step = {"training.gradient_accumulation_steps": 4, "training.total_episodes": 8, **changes}
    config = config_of(parts, tmp_path, **one_step)
    assert not plan_says_skipped(config)
    (row,) = rows(klimb.train(config).folder)
    assert row["policy/old_forwards"] > 0
    assert row["policy/old_pass_skipped"] == 0.0


def test_kl_and_mismatch_are_those_of_all_episodes_whatever_is_left_out(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    """No answer of a model that has learnt nothing is rewarded: every group is alike, and nothing is trained on."""
    (tmp_path / "nothing.py").write_text("def reward(prompt, response, answer):\n    return 0.5\n")
    changes = {
        "reward_model.functions": [{"name": f"{tmp_path / 'nothing.py'}:reward"}],
        "algorithm.adv_estimator": "rloo",
        "algorithm.filter_groups": True,
        "training.total_episodes": 16,
        **GROUPS,
    }
    folder = klimb.train(config_of(parts, tmp_path, **changes)).folder
    for row in rows(folder):
        assert row["filter/kept"] == 0.0
        assert row["filter/dropped_groups"] == 2.0
        assert row["kl/k3"] == 0.0
        assert row["mismatch/kl"] == pytest.approx(0.0, abs=1e-4)
        assert "policy/loss" not in row
    a, b = weights(folder, 1), load_file(parts[0] / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_nothing_is_steered_while_the_critic_warms_up(parts: tuple[Path, Path], tmp_path: Path) -> None:
    changes = {"critic.warmup_phases": 3, "algorithm.kl_ctrl.type": "pi", "training.total_episodes": 40}
    coefs = [row["kl/coef"] for row in rows(klimb.train(config_of(parts, tmp_path, **changes)).folder)]
    assert coefs[:4] == [0.05] * 4
    assert coefs[4] != 0.05


def test_a_run_that_only_warms_up_its_critic_is_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic\.warmup_phases is 6, but the run has 6 rollout phases"):
        klimb.train(config_of(parts, tmp_path, **{"critic.warmup_phases": 6}))


RESUMED: dict[str, dict[str, Any]] = {
    "remax, pi, soft penalty": {
        "algorithm.adv_estimator": "remax",
        "algorithm.kl_ctrl.type": "pi",
        "algorithm.truncated": {"penalty": 0.2, "overlong_buffer": 4},
        "reward_model.normalize": "running",
    },
    "filtration, bootstrap, cispo": {
        "algorithm.policy_filtration.strategy": "best_random",
        "algorithm.truncated": "bootstrap",
        "algorithm.policy_loss": "cispo",
        **GROUPS,
    },
    "filtered groups, correction, rejection": {
        "algorithm.adv_estimator": "opo",
        "algorithm.filter_groups": True,
        "algorithm.rollout_correction": {
            "weights": "band",
            "normalize": True,
            "reject": {"criterion": "seq_mean_k1", "lo": 0.5, "hi": 2.0},
        },
        **GROUPS,
    },
}


@pytest.mark.parametrize("changes", RESUMED.values(), ids=RESUMED.keys())
def test_a_resumed_run_is_the_same_to_the_last_bit(
    parts: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = {"training.total_episodes": 32, **changes}
    whole = klimb.train(config_of(parts, tmp_path, **changes, **{"run.name": "whole"})).folder
    config = config_of(parts, tmp_path, **changes, **{"run.name": "halves"})
    halves = klimb.train(config).folder
    for step in (3, 4):
        (halves / "checkpoints" / checkpoint.checkpoint_name(step) / "manifest.json").unlink()
    klimb.train(config)
    assert rows(halves) == rows(whole)
    a, b = weights(halves, 4), weights(whole, 4)
    assert all(torch.equal(a[name], b[name]) for name in b)
