"""Where the policy stands to its reference: exploded, vanished, or out of the controller's reach."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from klimb.doctor.finding import Facts, Seen, Severity
from klimb.doctor.limits import limit
from klimb.doctor.policy import seen
from klimb.doctor.stats import Span, spans
from klimb.doctor.table import Curve, Table

NAMES = ("kl/k3", "kl/k1", "kl/per_episode")


def divergence(table: Table) -> tuple[str, Curve] | None:
    """KL to the reference in nats per token; one given per episode is divided by the answers' mean length."""
    for name in NAMES[:2]:
        if (curve := table.curve(name)) is not None:
            return name, curve
    per_episode, length = table.curve("kl/per_episode"), table.curve("length/mean")
    if per_episode is None or length is None or not len(length.finite):
        return None
    lengths = np.interp(per_episode.steps, length.finite.steps, length.finite.values)
    return "kl/per_episode", Curve(steps=per_episode.steps, values=per_episode.values / np.maximum(lengths, 1.0))


def target_of(table: Table, facts: Facts) -> float | None:
    logged = table.curve("kl/target")
    target = facts.target_kl
    if logged is not None and len(logged.finite):
        target = float(logged.finite.values[-1])
    return target if target is not None and math.isfinite(target) and target > 0 else None


def warning_level(target: float | None) -> float:
    return limit("kl_warning") if target is None else limit("kl_target_warning") * target


def is_calm(table: Table, facts: Facts) -> bool:
    """Whether the newest KL is under the level of a warning, however short it has been anywhere else."""
    found = divergence(table)
    return found is None or bool(found[1].values[-1] < warning_level(target_of(table, facts)))


def _levels(target: float | None, unit: str) -> tuple[float, float]:
    """Of a warning and of an alarm."""
    if unit == "answer":
        return limit("kl_answer_warning"), limit("kl_answer_alarm")
    return warning_level(target), limit("kl_alarm") if target is None else limit("kl_target_alarm") * target


def explosion(table: Table, facts: Facts) -> Seen | None:
    found, unit = divergence(table), "token"
    if found is None and (answers := table.curve("kl/per_episode")) is not None:  # no length to divide by
        found, unit = ("kl/per_episode", answers), "answer"
    if found is None:
        return None
    name, curve = found
    other = _other_reference(name, curve, facts)
    if other is not None:
        return other
    target = target_of(table, facts) if unit == "token" else None
    warn, alarm = _levels(target, unit)
    values = np.where(np.isnan(curve.values), np.inf, curve.values)
    # Three in four over the limit, or two in a row far over it: an explosion need not be waited for.
    severity: Severity = "alarm"
    every = [*spans(values > alarm, 3, 4), *spans(values > 10 * alarm, 2, 2)]
    fell = ""
    if not every:
        every, severity = spans(values > warn, 5, 6), "warning"
        lost = _reward_lost(table, curve, spans(values > warn, 4, 5))
        if lost is not None:
            every, severity, fell = [lost[0]], "alarm", lost[1]
    if not every:
        return None
    last = max(s.last for s in every)
    span = replace(min(every, key=lambda s: s.named), last=last, since=max(s.since for s in every))
    part = values[span.first : last + 1]
    peak = float(np.max(part))
    level = f"{peak / target:.3g} times its target {target:g}" if target else "with no target to compare with"
    at = int(curve.steps[span.first + int(np.argmax(part))])
    text = (
        f"KL to the reference reached {peak:.3g} nats per {unit} at step {at}, {level}; it was {float(values[0]):.3g} "
        f"at step {int(curve.steps[0])}{fell}"
    )
    return seen(severity, curve, span, text, name)


def _reward_lost(table: Table, curve: Curve, over: list[Span]) -> tuple[Span, str] | None:
    """A KL over the level of a warning is an alarm when the reward fell with it: the way it went leads nowhere.

    Against the better of the first two steps (the second may be lost already), by more than half of the spread there.
    """
    mean, std = table.curve("reward/mean"), table.curve("reward/std")
    if not over or mean is None or std is None or len(mean.finite) < 6 or not len(std.finite):
        return None
    values, until = mean.finite.values, mean.finite.between(0, int(curve.steps[over[-1].last])).values
    start, now = float(np.max(values[:2])), float(np.mean(until[-4:]))
    by = limit("reward_lost") * float(np.max(std.finite.values[:2]))
    if start - now <= by:
        return None
    return over[-1], f"; the mean reward fell with it, from {start:.3g} to {now:.3g}"


def _other_reference(name: str, curve: Curve, facts: Facts) -> Seen | None:
    """A klimb run starts at its reference: a KL that is there before the first update is no explosion."""
    if facts.source != "klimb" or name == "kl/per_episode" or len(curve) < 2 or curve.steps[0] > 2:
        return None
    early = curve.values[:2]
    if not (np.isfinite(early).all() and early[0] > limit("kl_first")):
        return None
    text = (
        f"KL is already {float(early[0]):.3g} nats per token at step {int(curve.steps[0])}, before the policy has "
        f"moved, and {float(curve.values[-1]):.3g} at step {int(curve.steps[-1])}: the reference is another model"
    )
    return seen("alarm", curve, Span(first=0, named=1, last=len(curve) - 1, since=0), text, name, "reference")


def vanished(table: Table, facts: Facts) -> Seen | None:
    found = divergence(table)
    if found is None:
        return None
    name, curve = found
    target = target_of(table, facts)
    floor = limit("kl_vanished_absolute") if target is None else limit("kl_vanished") * target
    began = curve.between(int(curve.steps[0]) + 10, int(curve.steps[-1]))  # every run starts at 0
    over = [span for span in spans(np.abs(began.values) < floor, 18, 20) if span.last >= len(began) - 3]
    if not over:
        return None
    span = over[-1]
    median = float(np.median(began.values[span.first :]))
    against = f"{median / target:.2g} of its target {target:g}" if target else "as if nothing were learnt"
    text = (
        f"KL has been {median:.2g} nats per token since step {int(began.steps[span.first])}, {against}: the policy "
        "does not move"
    )
    return seen("warning", began, span, text, name)


def pinned(table: Table, facts: Facts) -> Seen | None:
    """The coefficient sits at a clamp while the KL stays off its target in the direction the clamp forbids."""
    at, found, target = table.curve("kl/at_clamp"), divergence(table), target_of(table, facts)
    coefs = table.curve("kl/coef")
    if at is None or found is None or target is None or coefs is None or not len(coefs.finite):
        return None
    _, curve = found
    need = int(limit("pinned_steps"))
    ratio = np.interp(at.steps, curve.finite.steps, curve.finite.values) / target if len(curve.finite) else None
    if ratio is None:
        return None
    for word, off in (("upper", ratio > limit("pinned_over")), ("lower", ratio < limit("pinned_under"))):
        flags = (at.values > 0) & off
        # Early on the KL is under any target.
        flags &= at.steps > (at.steps[0] + 5)
        over = [span for span in spans(flags, need - 3, need) if span.last >= len(at) - 4]
        if not over:
            continue
        span = over[-1]
        coef, mean = float(coefs.finite.values[-1]), float(np.median(ratio[span.first : span.last + 1]))
        if not _is_that_clamp(word, coef, facts):
            continue
        text = (
            f"the KL coefficient has sat at its {word} clamp {coef:.3g} since step {int(at.steps[span.first])} while "
            f"KL is {mean:.2g} times its target {target:g}"
        )
        return seen("alarm" if word == "upper" else "warning", at, span, text, "kl/coef", word)
    return None


def _is_that_clamp(word: str, coef: float, facts: Facts) -> bool:
    low, high = facts.min_kl_coef, facts.max_kl_coef
    if low is None or high is None:
        return True
    return abs(coef - (high if word == "upper" else low)) <= 1e-6 * max(1.0, abs(coef))
