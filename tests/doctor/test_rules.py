"""Each finding on a table that has it, and none on tables that do not."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from klimb.config.load import load_config, with_overrides
from klimb.doctor.finding import Facts, Finding
from klimb.doctor.limits import LIMITS
from klimb.doctor.remedies import MECHANISM, REMEDIES
from klimb.doctor.rules import CODES, examine
from klimb.doctor.table import Table
from tests.doctor.tables import healthy, ramp, rows_of

STEERED = Facts(
    target_kl=0.02,
    kl_type="adaptive",
    kl_in_loss=True,
    kl_in_reward=False,
    explicit=True,
    lr=1e-4,
    temperature=1.0,
    init_kl_coef=0.15,
    min_kl_coef=0.001,
    max_kl_coef=5.0,
    ppo_epochs=1,
    train_batch=12,
    micro_batch=12,
    accumulation=1,
    rollout_batch=24,
    rollouts_per_prompt=1,
    max_tokens=64,
    critic_lr=1e-3,
)
EVAL = [0.4, 0.3, 0.1, 0.05, 0.02, 0.0]


def with_eval(values: Sequence[float], **changed: Sequence[float]) -> Table:
    """Held out every tenth step."""
    table = healthy(**changed)
    rows = [{"step": float(s)} for s in range(1, 61)]
    for name, curve in table.curves.items():
        for step, value in zip(curve.steps, curve.values, strict=True):
            rows[int(step) - 1][name] = float(value)
    for i, value in enumerate(values):
        rows[10 * i]["eval/accuracy"] = value
    return Table.of(rows)


FAULTY: dict[str, Table] = {
    "kl_explosion": healthy(kl__k3=ramp(0.02, 0.5, 20)),
    "kl_vanished": healthy(kl__k3=[1e-6] * 60),
    "reward_degenerate": healthy(reward__std=[0.0] * 60, reward__mean=[0.7] * 60),
    "reward_volatile": healthy(reward__mean=[0.5 + 0.45 * (-1) ** i for i in range(60)]),
    "reward_hacking": with_eval(EVAL, reward__mean=np.linspace(0.2, 0.9, 60).tolist()),
    "ratio_spikes": healthy(policy__ratio_abs_dev=ramp(0.003, 0.3, 20)),
    "engine_mismatch": healthy(mismatch__kl=ramp(0.0, 0.05, 10)),
    "entropy_collapse": healthy(policy__entropy=ramp(0.09, 0.003, 20)),
    "entropy_explosion": healthy(policy__entropy=ramp(0.3, 2.5, 20)),
    "length_drift": healthy(length__mean=np.linspace(44, 130, 60).tolist()),
    "truncation": healthy(length__truncated=ramp(0.0, 0.9, 20)),
    "repetition": healthy(text__repetition=ramp(0.05, 0.8, 20)),
    "critic_failing": healthy(value__explained_variance=[-0.6] * 60),
    "coefficient_pinned": healthy(
        kl__at_clamp=ramp(0.0, 1.0, 20), kl__coef=ramp(0.15, 5.0, 20), kl__k3=ramp(0.02, 0.06, 20)
    ),
    "nonfinite": healthy(policy__skipped_steps=ramp(0.0, 2.0, 20)),
    "memory_pressure": healthy(memory__update_peak=ramp(1e9, 7.9e9, 20)),
}


def found(table: Table, facts: Facts = STEERED) -> dict[str, Finding]:
    return {finding.code: finding for finding in examine(table, facts).findings}


def test_every_finding_has_a_table_a_mechanism_and_remedies() -> None:
    assert set(FAULTY) == set(CODES) == set(REMEDIES)
    assert {name.partition(".")[0] for name in MECHANISM} == set(CODES)
    for text in MECHANISM.values():
        assert text.count(". ") == 1, text
        assert text.endswith(".")
    assert all(limit.source and limit.unit for limit in LIMITS.values())


@pytest.mark.parametrize("code", CODES)
def test_the_fault_is_named_first_with_its_numbers(code: str) -> None:
    first = examine(FAULTY[code], STEERED).findings[0]
    assert first.code == code
    assert any(character.isdigit() for character in first.evidence)
    assert first.remedies
    assert first.first <= first.named <= first.last <= 60
    if code not in ("kl_vanished", "reward_degenerate", "reward_volatile", "reward_hacking", "critic_failing"):
        assert 8 <= first.first <= 56


@pytest.mark.parametrize("seed", range(40))
def test_a_healthy_run_with_noise_has_no_alarm(seed: int) -> None:
    assert not examine(healthy(seed=seed), STEERED).has_alarm


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_short_runs_give_answers_and_no_false_alarm(steps: int) -> None:
    assert not examine(healthy(steps=steps), STEERED).has_alarm
    assert examine(Table.of([]), Facts()).findings == ()


@pytest.mark.parametrize("code", CODES)
def test_without_its_series_a_rule_says_what_it_needs(code: str) -> None:
    examination = examine(Table.of([{"step": 1, "other": 1.0}]), STEERED)
    missing = {m.code: m.needs for m in examination.missing}
    assert code in missing
    assert all(group for group in missing[code])


@pytest.mark.parametrize("code", CODES)
def test_one_odd_step_is_no_alarm(code: str) -> None:
    """A single outlier of every series at once, but for what is never odd: NaN, and memory at its limit."""
    table, sound = FAULTY[code], healthy()
    rows = rows_of({name: curve.values.tolist() for name, curve in sound.curves.items()}, 60)
    for name, curve in table.curves.items():
        rows[40][name] = float(curve.values[-1])
    now = found(Table.of(rows))
    if code != "memory_pressure":
        assert code not in now or now[code].severity != "alarm"


@pytest.mark.parametrize("code", CODES)
def test_a_restart_in_the_middle_changes_nothing(code: str) -> None:
    rows = rows_of({n: c.values.tolist() for n, c in FAULTY[code].curves.items() if len(c) == 60}, 60)
    if code == "reward_hacking":
        for i, value in enumerate(EVAL):
            rows[10 * i]["eval/accuracy"] = value
    again = Table.of([*rows[:45], *rows[30:]])
    whole = examine(Table.of(rows), STEERED)
    assert examine(again, STEERED) == whole
    assert whole.findings[0].code == code


def test_remedies_of_an_explosion_are_in_the_order_of_the_design() -> None:
    overrides = [r.override for r in found(FAULTY["kl_explosion"])["kl_explosion"].remedies]
    assert overrides == [
        "training.lr=5e-05",
        "algorithm.kl_ctrl.init_kl_coef=0.3",
        "actor_rollout_ref.temperature=0.8",
        "training.gradient_accumulation_steps=2",
    ]
    epochs = found(FAULTY["kl_explosion"], Facts(target_kl=0.02, ppo_epochs=4))["kl_explosion"].remedies
    assert [r.override for r in epochs][3:] == ["algorithm.ppo_epochs=1", None]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "facts", [STEERED, Facts(explicit=False, kl_type="fixed", rollouts_per_prompt=8, engine="vllm")]
)
def test_every_override_is_one_that_a_config_takes(code: str, facts: Facts) -> None:
    config = load_config("recipes/arithmetic.yaml").config
    findings = examine(FAULTY[code], facts).findings
    tried = [r.override for f in findings for r in f.remedies if r.override is not None]
    for override in tried:
        words = ["actor_rollout_ref.rollouts_per_prompt=4"] if "filter_groups" in override else []  # it needs groups
        with_overrides(config, [*words, *shlex.split(override)])


@pytest.mark.parametrize("provider", ["hf", "vllm"])
def test_a_mismatch_under_another_engine_is_tried_with_the_trainers_own_weights(provider: str) -> None:
    facts = Facts.of({"actor_rollout_ref": {"rollout_provider": provider}})
    overrides = [r.override for r in found(FAULTY["engine_mismatch"], facts)["engine_mismatch"].remedies]
    assert ("actor_rollout_ref.rollout_provider=hf" in overrides) == (provider == "vllm")


def test_a_reference_that_is_another_model_is_told_from_an_explosion() -> None:
    finding = found(healthy(kl__k3=[0.3 + 0.001 * i for i in range(60)]))["kl_explosion"]
    assert finding.first == 1
    assert "another model" in finding.evidence
    assert finding.remedies[0].override == "actor_rollout_ref.ref_model_path=null"


def test_without_a_target_levels_are_absolute() -> None:
    no_target = {"kl__target": []}
    facts = Facts(kl_type="fixed")
    assert found(healthy(kl__k3=ramp(0.02, 0.6, 20), **no_target), facts)["kl_explosion"].severity == "alarm"
    assert found(healthy(kl__k3=ramp(0.02, 0.2, 20), **no_target), facts)["kl_explosion"].severity == "warning"
    assert "kl_explosion" not in found(healthy(kl__k3=ramp(0.02, 0.1, 20), **no_target), facts)


def test_kl_per_episode_is_divided_by_the_length() -> None:
    rows = rows_of({"kl/per_episode": ramp(0.5, 44.0, 20), "length/mean": [44.0] * 60}, 60)
    finding = found(Table.of(rows), Facts(source="trl"))["kl_explosion"]
    assert "reached 1 nats per token" in finding.evidence
    calm = Table.of(rows_of({"kl/per_episode": [4.4] * 60, "length/mean": [44.0] * 60}, 60))
    assert "kl_explosion" not in found(calm, Facts(source="trl"))


def test_rewards_that_have_reached_their_top_are_a_note() -> None:
    top = np.minimum(1.0, np.linspace(0.3, 1.4, 60))
    std = np.where(top < 1, 0.2, 0.0)
    findings = found(healthy(reward__mean=top.tolist(), reward__std=std.tolist()))
    assert findings["reward_degenerate"].severity == "note"


def test_a_lost_spread_after_another_alarm_is_its_symptom() -> None:
    table = healthy(kl__k3=ramp(0.02, 3.0, 20), reward__std=ramp(0.3, 0.0, 18), reward__mean=ramp(0.5, 0.0, 18))
    codes = [f.code for f in examine(table, STEERED).findings]
    assert codes[0] == "kl_explosion"
    assert codes.index("kl_explosion") < codes.index("reward_degenerate")


def test_what_came_later_names_what_came_first() -> None:
    table = healthy(policy__ratio_abs_dev=ramp(0.003, 0.5, 10), kl__k3=ramp(0.02, 3.0, 20))
    findings = found(table)
    assert findings["ratio_spikes"].after is None
    assert findings["kl_explosion"].after == "ratio_spikes"


def test_not_a_number_in_the_kl_is_an_alarm_at_once() -> None:
    values = [0.02] * 60
    values[30] = math.nan
    finding = found(healthy(kl__k3=values))["nonfinite"]
    assert (finding.severity, finding.first) == ("alarm", 31)


def test_a_single_skipped_step_is_a_warning() -> None:
    skipped = [0.0] * 60
    skipped[30] = 1.0
    assert found(healthy(policy__skipped_steps=skipped))["nonfinite"].severity == "warning"


def test_a_policy_that_is_sure_and_right_is_only_warned_of() -> None:
    solved = {"reward__mean": np.linspace(0.3, 0.99, 60).tolist(), "policy__entropy": ramp(0.09, 0.003, 20)}
    assert found(healthy(**solved))["entropy_collapse"].severity == "warning"


@pytest.mark.parametrize(
    ("name", "sound", "off"),
    [
        ("mismatch/kl", 0.001, -0.05),
        ("mismatch/k3", 0.0001, 0.02),
        ("mismatch/probs_diff_mean", 0.004, 0.02),
        ("mismatch/logprob_diff_mean", 0.02, 0.3),
        ("mismatch/ess", 0.9, 0.1),
    ],
)
def test_any_measure_of_the_mismatch_will_do(name: str, sound: float, off: float) -> None:
    assert not examine(Table.of(rows_of({name: [sound] * 20}, 20)), Facts()).has_alarm
    (finding,) = examine(Table.of(rows_of({name: ramp(sound, off, 10, 20)}, 20)), Facts()).findings
    assert (finding.code, finding.first, finding.series) == ("engine_mismatch", 11, name)


def test_groups_without_spread() -> None:
    assert found(healthy(reward__frac_zero_std=[1.0] * 60))["reward_degenerate"].severity == "alarm"
    finding = found(healthy(reward__frac_zero_std=[0.8] * 60), Facts(rollouts_per_prompt=8))["reward_degenerate"]
    assert finding.severity == "warning"
    assert "algorithm.filter_groups=true" in [r.override for r in finding.remedies]


def test_a_critic_that_is_off_in_one_direction_fails_and_one_that_only_explains_little_does_not() -> None:
    assert found(healthy(advantage__mean=[0.4] * 60))["critic_failing"].severity == "alarm"
    assert "critic_failing" not in found(healthy(value__explained_variance=[0.0] * 60))


@pytest.mark.parametrize("every", [1, 5])
def test_memory_that_grows_to_its_limit_is_seen_before(every: int) -> None:
    """klimb's own peaks are measured in some steps only."""
    growing = np.linspace(1e9, 5.5e9, 60) + 1e7 * np.random.default_rng(0).standard_normal(60)
    growing[np.arange(60) % every != 0] = np.nan
    finding = found(healthy(memory__update_peak=growing.tolist()))["memory_pressure"]
    assert finding.severity == "warning"
    assert re.search(r"grew by .* GiB in \d\d steps", finding.evidence)
    orders = [r.override for r in finding.remedies]
    assert orders[0] == "training.activation_checkpointing=true"
    assert orders[-1] == "algorithm.use_pf_ppo=false"


def test_facts_survive_any_config() -> None:
    odd: list[Any] = [{}, {"training": None}, {"training": {"lr": "auto", "micro_batch_size": True}}, {"algorithm": []}]
    for tree in odd:
        facts = Facts.of(tree)
        assert facts.lr is None
        assert facts.train_batch is None
    tree = {"training": {"lr": 1, "micro_batch_size": 4, "gradient_accumulation_steps": 2}}
    assert (Facts.of(tree).lr, Facts.of(tree).train_batch) == (1.0, 8)


def test_hacking_is_seen_when_the_held_out_value_rose_before_it_fell() -> None:
    """Over-optimised reward models do this: both rise, then only one."""
    rising = {"reward__mean": np.linspace(0.2, 0.95, 60).tolist()}
    peaked = found(with_eval([0.3, 0.6, 0.9, 0.5, 0.35, 0.3], **rising))["reward_hacking"]
    assert peaked.severity == "alarm"
    assert peaked.first == 21
    assert "0.3 at first, 0.9 at best" in peaked.evidence
    assert "reward_hacking" not in found(with_eval([0.3, 0.5, 0.6, 0.55, 0.6, 0.58], **rising))
    flat = [0.3, 0.32, 0.29, 0.3, 0.28, 0.29]
    assert found(with_eval(flat, **rising, reward__std=[0.1] * 60))["reward_hacking"].severity == "warning"


def test_a_kl_that_is_only_high_is_an_alarm_when_the_reward_fell_with_it() -> None:
    high, fallen = ramp(0.01, 0.1, 10), ramp(0.5, 0.2, 10)
    assert found(healthy(kl__k3=high))["kl_explosion"].severity == "warning"
    finding = found(healthy(kl__k3=high, reward__mean=fallen))["kl_explosion"]
    assert finding.severity == "alarm"
    assert "the mean reward fell with it, from 0.5 to 0.2" in finding.evidence
    assert "kl_explosion" not in found(healthy(reward__mean=fallen))
