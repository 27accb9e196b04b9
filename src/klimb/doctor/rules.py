"""All rules over a table: findings, worst and earliest first, and what could not be judged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from klimb.doctor import kl, machine, policy, responses, reward
from klimb.doctor.finding import RANK, Facts, Finding, Seen
from klimb.doctor.remedies import mechanism, remedies
from klimb.doctor.table import Table


@dataclass(frozen=True, kw_only=True)
class Rule:
    """needs: groups of series; the rule can speak when of each group one is there."""

    code: str
    check: Callable[[Table, Facts], Seen | None]
    needs: tuple[tuple[str, ...], ...]


KL = ("kl/k3", "kl/k1", "kl/per_episode")
ENGINE = ("mismatch/kl", "mismatch/k3", "mismatch/probs_diff_mean", "mismatch/logprob_diff_mean", "mismatch/ess")
RULES: tuple[Rule, ...] = (
    Rule(
        code="nonfinite",
        check=policy.nonfinite,
        needs=(("policy/skipped_steps", "policy/loss", "policy/grad_norm", *KL),),
    ),
    Rule(
        code="engine_mismatch",
        check=policy.engine_mismatch,
        needs=(ENGINE,),
    ),
    Rule(code="kl_explosion", check=kl.explosion, needs=(KL,)),
    Rule(
        code="ratio_spikes",
        check=policy.ratio_spikes,
        needs=(("policy/ratio_abs_dev", "policy/approx_kl", "policy/clip_fraction", "policy/clip_fraction_high"),),
    ),
    Rule(code="truncation", check=responses.truncation, needs=(("length/truncated",),)),
    Rule(
        code="reward_degenerate", check=reward.degenerate, needs=(("reward/std", "reward/max", "reward/frac_zero_std"),)
    ),
    Rule(code="entropy_explosion", check=policy.entropy_explosion, needs=(("policy/entropy",),)),
    Rule(code="entropy_collapse", check=policy.entropy_collapse, needs=(("policy/entropy",),)),
    Rule(
        code="coefficient_pinned",
        check=kl.pinned,
        needs=(("kl/at_clamp",), ("kl/coef",), KL),
    ),
    Rule(code="reward_hacking", check=reward.hacking, needs=(("reward/mean",), reward.HELD_OUT)),
    Rule(
        code="critic_failing",
        check=machine.critic_failing,
        needs=(("value/explained_variance", "value/loss"),),
    ),
    Rule(code="repetition", check=responses.repetition, needs=(("text/repetition",),)),
    Rule(code="reward_volatile", check=reward.volatile, needs=(("reward/mean",), ("reward/std",))),
    Rule(code="length_drift", check=responses.length_drift, needs=(("length/mean",),)),
    Rule(code="kl_vanished", check=kl.vanished, needs=(KL,)),
    Rule(code="memory_pressure", check=machine.memory_pressure, needs=(("memory/limit",), machine.PEAKS)),
)
"""In the order of causes: of findings that begin together the one further up comes first."""
CODES = tuple(rule.code for rule in RULES)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A rule that could not look, and the series it lacks (one of each group)."""

    code: str
    needs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Examination:
    findings: tuple[Finding, ...]
    missing: tuple[Missing, ...]

    @property
    def has_alarm(self) -> bool:
        return any(finding.severity == "alarm" for finding in self.findings)


def examine(table: Table, facts: Facts, rules: Sequence[Rule] = RULES) -> Examination:
    """Every rule over the table. Logs hold what they hold: what is not finite is the rules' matter, not a warning."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return _examine(table, facts, rules)


def _examine(table: Table, facts: Facts, rules: Sequence[Rule]) -> Examination:
    found: list[Finding] = []
    missing: list[Missing] = []
    for rule in rules:
        lacking = tuple(group for group in rule.needs if table.curve(*group) is None)
        if lacking:
            missing.append(Missing(code=rule.code, needs=lacking))
            continue
        seen = rule.check(table, facts)
        if seen is not None:
            found.append(_finding(rule.code, seen, facts))
    return Examination(findings=_ordered(found), missing=tuple(missing))


def _finding(code: str, seen: Seen, facts: Facts) -> Finding:
    return Finding(
        **vars(seen), code=code, mechanism=mechanism(code, seen.variant), remedies=remedies(code, seen, facts)
    )


EARLY = 3
"""Steps from the start within which a reward without spread is a cause. Later it is what a lost policy leads to, as a
length that drifts always is."""


def _ordered(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Alarms, warnings, notes; within each the earliest first, since what came later may follow from it."""

    def is_symptom(f: Finding) -> bool:
        return f.code == "length_drift" or (f.code == "reward_degenerate" and f.first > EARLY)

    ranked = sorted(found, key=lambda f: (RANK[f.severity], is_symptom(f), f.first, CODES.index(f.code)))
    alarms = [f for f in ranked if f.severity == "alarm"]
    out: list[Finding] = []
    for finding in ranked:
        earlier = min((f for f in alarms if f.first < finding.first), key=lambda f: f.first, default=None)
        out.append(finding if earlier is None else replace(finding, after=earlier.code))
    return tuple(out)
