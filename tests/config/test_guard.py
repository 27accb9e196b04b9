"""What may differ between a checkpoint and the run that goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from klimb.config.guard import refuse_other_kind
from klimb.config.load import known_keys
from klimb.config.posture import filled, resolve
from klimb.config.schema import RunConfig
from klimb.errors import CheckpointError

from .conftest import MODEL, Load

PLACE = Path("runs/a/checkpoints/step-000003")


def resume(load: Load, *overrides: str) -> list[str]:
    return refuse_other_kind(load(MODEL).config, load(MODEL, *overrides).config, PLACE)


def test_the_same_run_goes_on_in_silence(load: Load) -> None:
    assert resume(load) == []


def test_the_other_posture_is_refused_with_its_keys_and_a_remedy(load: Load) -> None:
    with pytest.raises(CheckpointError) as error:
        resume(load, "algorithm.use_pf_ppo=false")
    message = str(error.value)
    assert message.startswith(f"{PLACE}: ")
    assert "  algorithm.use_pf_ppo: True there, False now\n" in message
    assert "  algorithm.lam: 0.95 there, 0.9 now\n" in message
    assert "  algorithm.kl_ctrl.type: 'adaptive' there, 'fixed' now\n" in message
    assert "run.name=" in message
    assert "training.resume=never" in message


FIXED = [
    ("actor_rollout_ref.model_path", "other"),
    ("actor_rollout_ref.ref_model_path", "other"),
    ("actor_rollout_ref.rollout_batch_size", "512"),
    ("actor_rollout_ref.rollouts_per_prompt", "2"),
    ("actor_rollout_ref.temperature", "1.0"),
    ("actor_rollout_ref.max_tokens", "8"),
    ("actor_rollout_ref.stop", "[x]"),
    ("algorithm.gamma", "0.9"),
    ("actor_rollout_ref.rollout_provider", "vllm"),
    ("algorithm.loss_agg", "seq-mean-token-mean"),
    ("algorithm.kl_ctrl.target_kl", "0.03"),
    ("algorithm.kl_ctrl.init_kl_coef", "0.03"),
    ("critic.model_path", "other"),
    ("critic.value_clip", "null"),
    ("reward_model.model_path", "other"),
    ("reward_model.functions", "[{name: regex, args: {x: 1}}]"),
    ("reward_model.clip", "[-1, 1]"),
    ("reward_model.normalize", "running"),
    ("data.train_files", "[x]"),
    ("data.shuffle", "false"),
    ("training.seed", "1"),
    ("training.dtype", "float32"),
]
FREE = [
    ("actor_rollout_ref.rollout_slots", "8"),
    ("actor_rollout_ref.vllm.memory_share", "0.3"),
    ("actor_rollout_ref.use_dynamic_bsz", "false"),
    ("critic.lr", "1e-4"),
    ("reward_model.workers", "7"),
    ("data.eval_files", "[x]"),
    ("training.lr", "1e-5"),
    ("training.save_freq", "10"),
    ("eval.max_prompts", "3"),
]
SILENT = [
    ("logging.wandb", "x"),
    ("logging.samples_per_phase", "0"),
    ("run.name", "b"),
    ("run.dir", "elsewhere"),
    ("training.resume", "never"),
    ("training.keep_checkpoints", "9"),
]


@pytest.mark.parametrize(("key", "value"), FIXED, ids=[k for k, _ in FIXED])
def test_what_makes_it_another_run_is_refused(load: Load, key: str, value: str) -> None:
    with pytest.raises(CheckpointError, match=rf"  {key}: .* there, .* now"):
        resume(load, f"{key}={value}")


@pytest.mark.parametrize(("key", "value"), FREE, ids=[k for k, _ in FREE])
def test_what_may_change_is_said(load: Load, key: str, value: str) -> None:
    warnings = resume(load, f"{key}={value}")
    assert [w.split(" was ")[0] for w in warnings] == [key]


@pytest.mark.parametrize(("key", "value"), SILENT, ids=[k for k, _ in SILENT])
def test_what_changes_no_number_is_silent(load: Load, key: str, value: str) -> None:
    assert resume(load, f"{key}={value}") == []


def test_auto_and_its_value_are_the_same_run(load: Load) -> None:
    config = load(MODEL).config
    complete = filled(config, resolve(config))
    assert refuse_other_kind(config, complete, PLACE) == []
    assert resume(load, "algorithm.lam=0.95", "algorithm.use_kl_in_reward=false") == []


def test_a_free_change_beside_a_fixed_one_does_not_hide_it(load: Load) -> None:
    with pytest.raises(CheckpointError) as error:
        resume(load, "training.lr=1e-5", "algorithm.gamma=0.5")
    assert "algorithm.gamma" in str(error.value)
    assert "training.lr" not in str(error.value)


def test_a_config_read_back_from_a_checkpoint_compares_equal(load: Load) -> None:
    config = load(
        MODEL, "reward_model.functions=[{name: regex, args: {x: [1, 2]}}]", "reward_model.clip=[-1, 1]"
    ).config
    again = RunConfig.model_validate_json(json.dumps(config.model_dump(mode="json")))
    assert refuse_other_kind(again, config, PLACE) == []


def test_every_rule_names_a_key_that_exists() -> None:
    from klimb.config import guard

    keys = [key for key, _ in known_keys()]
    for rule in (*guard.FREE, *guard.SILENT, *guard.GUARDED_AGAIN):
        assert rule.rstrip(".") in keys
