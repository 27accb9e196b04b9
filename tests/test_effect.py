"""Every key of `algorithm` changes the gradients of a fixed batch, or `plan` says that nothing reads it."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from klimb.algos import correction, filtration, kl, ops
from klimb.algos.loss import POLICY_LOSSES
from klimb.algos.table import ADVANTAGES
from klimb.build import make_controller, make_recipe
from klimb.config import facts
from klimb.config.algorithm import AlgorithmConfig, CorrectionConfig, FiltrationConfig, RejectConfig
from klimb.config.counts import count
from klimb.config.inert import inert
from klimb.config.load import known_keys
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError
from klimb.learn import Roles, estimate_advantages, score_tokens
from klimb.selection import shape_rewards, with_greedy
from klimb.types import Batch
from klimb.update import update
from tests.test_update import recording
from tests.tiny_models import apart_roles, make_phase, split_of, tiny_model

A = "algorithm."
GROUPS = "actor_rollout_ref.rollouts_per_prompt=4"
NO_CLIP = "training.max_grad_norm=1e9"  # which would hide a factor
KEYS = [key for key, info in known_keys() if key.startswith(A)]
LEAVES = [key for key in KEYS if not any(other.startswith(key + ".") for other in KEYS)]


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Sampled by another policy, so that ratio and mismatch are large; the second prompt's rewards are alike."""
    rewards: list[float | None] = [1.0, 0.0, 0.5, 2.0, 0.25, 0.25, 0.25, 0.25]
    return make_phase(tiny_model(seed=7, scale=6.0), rewards, per_prompt=4, max_tokens=6)


@pytest.fixture(scope="module")
def greedy() -> Batch:
    phase = make_phase(tiny_model(seed=7, scale=6.0), [0.3, 0.1], per_prompt=1)
    return replace(phase, group=torch.tensor([0, 1]))


@pytest.fixture(scope="module")
def roles() -> Roles:
    return apart_roles()


def load(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text("actor_rollout_ref: {model_path: m, rollout_batch_size: 8, max_tokens: 6, temperature: 1.0}\n")
    return RunConfig.load(
        path, [GROUPS, "training.micro_batch_size=2", "training.gradient_accumulation_steps=2", NO_CLIP, *overrides]
    )


def gradients(config: RunConfig, batch: Batch, greedy: Batch, roles: Roles) -> Tensor:
    """Of every optimizer step of one phase, actor and critic, after the controller has seen two phases."""
    posture = resolve(config)
    recipe, controller = make_recipe(config, posture, torch.float32), make_controller(config, posture)
    for seen in (0.05, 0.001):
        controller.update(seen, 8)
    own = Roles(
        actor=roles.actor,
        reference=roles.reference if posture.needs_reference else None,
        critic=roles.critic if config.needs_critic else None,
    )
    batch, _ = shape_rewards(batch, recipe)
    if config.algorithm.estimator.needs_greedy:
        batch, _ = with_greedy(batch, greedy)
    epochs = split_of(batch, step=4, micro=2, epochs=config.algorithm.ppo_epochs)
    scored, _ = score_tokens(batch, epochs[0], own, recipe)
    if recipe.explicit:
        assert scored.old_logprobs is not None
        noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)) * batch.mask
        scored = replace(scored, old_logprobs=scored.old_logprobs + 0.5 * noise)
    train, _ = estimate_advantages(scored, recipe, controller.coef, torch.Generator().manual_seed(1))
    epochs = epochs if recipe.filtration == "none" else split_of(train, step=4, micro=2, epochs=len(epochs))
    actor, of_actor = recording(own.actor)
    critic, of_critic = (None, []) if own.critic is None else recording(own.critic)
    update(actor, critic, train, epochs, recipe, controller.coef)
    return torch.cat([*of_actor, *of_critic])


EFFECT: dict[str, tuple[tuple[str, ...], str]] = {
    # key -> what it needs around it, another value
    "use_pf_ppo": ((), "false"),
    "adv_estimator": ((), "grpo"),
    "norm_by_std": (("adv_estimator=grpo",), "false"),
    "filter_groups": (("adv_estimator=reinforce_pp_baseline",), "true"),
    "policy_loss": ((), "cispo"),
    "loss_args": (("policy_loss=sapo",), "{tau_negative: 3.0}"),
    "loss_agg": ((), "seq-mean-token-sum"),
    "gamma": ((), "0.8"),
    "lam": ((), "0.5"),
    "clip_ratio_low": ((), "0.5"),
    "clip_ratio_high": ((), "0.5"),
    "dual_clip": ((), "1.1"),
    "entropy_coef": ((), "0.1"),
    "ppo_epochs": ((), "2"),
    "truncated": ((), "{penalty: 0.5}"),
    "use_kl_in_reward": (("use_kl_loss=false",), "true"),
    "use_kl_loss": ((), "false"),
    "kl_estimator": ((), "k3"),
    "kl_ctrl.type": ((), "pi"),
    "kl_ctrl.horizon": ((), "20"),
    "kl_ctrl.target_kl": ((), "0.06"),
    "kl_ctrl.init_kl_coef": ((), "0.2"),
    "kl_ctrl.min_kl_coef": (("kl_ctrl.horizon=20",), "0.05"),
    "kl_ctrl.max_kl_coef": (("kl_ctrl.horizon=20",), "0.05"),
    "rollout_correction.weights": ((), "token"),
    "rollout_correction.cap": (("rollout_correction.weights=token",), "1.1"),
    "rollout_correction.low": (("rollout_correction.weights=band",), "0.01"),
    "rollout_correction.normalize": (("rollout_correction.weights=token",), "true"),
    "rollout_correction.reject": ((), "{criterion: token_veto, lo: 0.2}"),
    "policy_filtration.strategy": ((), "best_worst"),
    "policy_filtration.power": (("policy_filtration.strategy=power",), "0.0"),
}
ACCEPTANCE = {"kl_ctrl.allow_both"}
"""What it changes is whether a config is accepted."""


def test_every_key_is_looked_at() -> None:
    assert {key.removeprefix(A) for key in LEAVES} == EFFECT.keys() | ACCEPTANCE


@pytest.mark.parametrize("key", EFFECT)
def test_every_key_changes_the_gradients(tmp_path: Path, batch: Batch, greedy: Batch, roles: Roles, key: str) -> None:
    around, value = EFFECT[key]
    given = [A + override for override in around]
    before = load(tmp_path, *given)
    after = load(tmp_path, *given, f"{A}{key}={value}")
    assert not inert_keys(after), "it is read here"
    a, b = gradients(before, batch, greedy, roles), gradients(after, batch, greedy, roles)
    assert a.isfinite().all()
    assert b.isfinite().all()
    assert a.shape != b.shape or float((a - b).norm() / a.norm()) > 1e-6


def inert_keys(config: RunConfig) -> list[str]:
    posture = resolve(config)
    return [key for key, _ in inert(config, posture, count(config, posture))]


CUT_OFF = ("score", "bootstrap", "exclude", "{penalty: 0.3}", "{penalty: 0.3, overlong_buffer: 5}")


def all_differ(found: dict[str, Tensor]) -> None:
    for (name, mine), (other, theirs) in itertools.combinations(found.items(), 2):
        assert mine.isfinite().all()
        assert mine.shape != theirs.shape or not torch.equal(mine, theirs), (name, other)


def test_every_form_of_truncated_is_another(tmp_path: Path, batch: Batch, greedy: Batch, roles: Roles) -> None:
    assert bool(batch.cut_off.any())
    assert not bool(batch.cut_off.all())
    all_differ({v: gradients(load(tmp_path, f"{A}truncated={v}"), batch, greedy, roles) for v in CUT_OFF})


def test_every_estimator_gives_a_gradient_of_its_own(tmp_path: Path, batch: Batch, greedy: Batch, roles: Roles) -> None:
    all_differ({n: gradients(load(tmp_path, f"{A}adv_estimator={n}"), batch, greedy, roles) for n in ADVANTAGES})


def test_every_loss_gives_a_gradient_of_its_own(tmp_path: Path, batch: Batch, greedy: Batch, roles: Roles) -> None:
    all_differ({n: gradients(load(tmp_path, f"{A}policy_loss={n}"), batch, greedy, roles) for n in POLICY_LOSSES})


def test_kl_in_both_places_is_accepted_only_when_asked_for(tmp_path: Path) -> None:
    both = (A + "use_kl_in_reward=true", A + "use_kl_loss=true")
    with pytest.raises(ConfigError, match="allow_both"):
        load(tmp_path, *both)
    assert not inert_keys(load(tmp_path, *both, A + "kl_ctrl.allow_both=true"))
    assert inert_keys(load(tmp_path, A + "kl_ctrl.allow_both=true")) == [A + "kl_ctrl.allow_both"]


INERT: list[tuple[tuple[str, ...], str, str]] = [
    *(((f"policy_loss={name}",), key, "0.5") for name in ("sapo", "reinforce") for key in facts.CLIPPING_KEYS[:2]),
    *(((f"policy_loss={name}",), "dual_clip", "1.1") for name in ("cispo", "gmpo", "sapo", "reinforce")),
    *(((f"adv_estimator={name}",), "lam", "0.5") for name in sorted(ADVANTAGES.keys() - {"gae"})),
    *(((f"adv_estimator={name}",), "gamma", "0.5") for name in sorted(ADVANTAGES.keys() - {"gae", "reinforce_pp"})),
    *(((f"adv_estimator={name}",), "norm_by_std", "false") for name in sorted(ADVANTAGES.keys() - {"grpo"})),
    (("use_pf_ppo=false",), "rollout_correction.weights", "token"),
    (("use_pf_ppo=false",), "rollout_correction.reject", "{criterion: token_veto, lo: 0.9}"),
    (("rollout_correction.weights=token",), "rollout_correction.low", "0.9"),
    (("policy_filtration.strategy=best_of_n",), "policy_filtration.power", "0.5"),
    (("kl_ctrl.type=pi",), "kl_ctrl.horizon", "20"),
    (("kl_ctrl.type=fixed",), "kl_ctrl.target_kl", "0.3"),
]


@pytest.mark.parametrize(("around", "key", "value"), INERT, ids=[f"{a[0]}-{k}" for a, k, _ in INERT])
def test_what_plan_calls_inert_changes_nothing(
    tmp_path: Path, batch: Batch, greedy: Batch, roles: Roles, around: tuple[str, ...], key: str, value: str
) -> None:
    given = [A + override for override in around]
    after = load(tmp_path, *given, f"{A}{key}={value}")
    assert inert_keys(after) == [A + key]
    before = gradients(load(tmp_path, *given), batch, greedy, roles)
    assert torch.equal(before, gradients(after, batch, greedy, roles))


ARGS = [(name, key) for name, loss in facts.POLICY_LOSSES.items() for key in loss.args.model_fields]


@pytest.mark.parametrize(("name", "key"), ARGS)
def test_every_setting_of_every_loss_has_an_effect(
    tmp_path: Path, batch: Batch, greedy: Batch, roles: Roles, name: str, key: str
) -> None:
    default = facts.POLICY_LOSSES[name].args.model_fields[key].default
    given = f"{A}policy_loss={name}"
    changed = load(tmp_path, given, f"{A}loss_args={{{key}: {2 * default}}}")
    before = gradients(load(tmp_path, given), batch, greedy, roles)
    assert not torch.equal(before, gradients(changed, batch, greedy, roles))


def literal(section: Any, field: str) -> set[str]:
    return set(get_args(section.model_fields[field].annotation))


def test_config_and_maths_know_the_same_names() -> None:
    assert facts.ESTIMATORS.keys() == ADVANTAGES.keys()
    assert facts.POLICY_LOSSES.keys() == POLICY_LOSSES.keys()
    assert literal(CorrectionConfig, "weights") == set(correction.KINDS)
    assert literal(RejectConfig, "criterion") == set(correction.CRITERIA)
    assert literal(FiltrationConfig, "strategy") == {"none", *filtration.STRATEGIES}
    assert literal(AlgorithmConfig, "kl_estimator") == {"auto", *kl.ESTIMATORS}
    assert literal(AlgorithmConfig, "loss_agg") == set(ops.LOSS_AGGS)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_takes_what_its_facts_say_with_the_same_defaults(name: str) -> None:
    of_function = {
        key: parameter.default
        for key, parameter in inspect.signature(POLICY_LOSSES[name]).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert of_function == AlgorithmConfig(policy_loss=name).loss_settings
