"""The reward: without spread, jumping about, or rising while what it stands for does not."""

from __future__ import annotations

import numpy as np

from klimb.doctor.finding import Facts, Seen, Severity
from klimb.doctor.limits import limit
from klimb.doctor.policy import START, first_of, seen, start_of
from klimb.doctor.stats import Span, joined, noise, risen, spans
from klimb.doctor.table import Curve, Table


def degenerate(table: Table, facts: Facts) -> Seen | None:
    """Rewards that are all alike carry no direction: every advantage is 0, or noise of the critic."""
    groups = table.curve("reward/frac_zero_std")
    found = _no_spread(table)
    if found is None and groups is not None:
        values = np.nan_to_num(groups.values)
        levels: dict[Severity, list[Span]] = {
            "alarm": spans(values >= limit("zero_groups_alarm"), 4, 5),
            "warning": spans(values >= limit("zero_groups_warning"), 8, 10),
        }
        named = first_of(levels)
        if named is not None:
            share = float(np.median(values[named[1].first : named[1].last + 1]))
            first, last = int(groups.steps[named[1].first]), int(groups.steps[named[1].last])
            text = (
                f"all answers got the same reward for {share:.0%} of the prompts from step {first} to {last}; those "
                "prompts teach nothing"
            )
            found = (named[0], groups, named[1], text, "reward/frac_zero_std")
    if found is None:
        return None
    severity, curve, span, text, name = found
    if severity == "alarm" and _at_the_top(table, int(curve.steps[span.first])):
        return seen("note", curve, span, f"{text}. The mean reward is at its highest: there is nothing left", name)
    return seen(severity, curve, span, text, name)


def _spread(table: Table) -> tuple[str, Curve] | None:
    """Standard deviation of a step's rewards; where nobody logs it, the range."""
    if (curve := table.curve("reward/std")) is not None:
        return "reward/std", curve
    low, high = table.curve("reward/min"), table.curve("reward/max")
    if low is None or high is None or len(low) != len(high):
        return None
    return "reward/max", Curve(steps=low.steps, values=high.values - low.values)


def _no_spread(table: Table) -> tuple[Severity, Curve, Span, str, str] | None:
    spread, mean = _spread(table), table.curve("reward/mean")
    if spread is None:
        return None
    name, curve = spread
    scale = np.zeros_like(curve.values)
    if mean is not None and len(mean.finite):
        scale = np.abs(np.interp(curve.steps, mean.finite.steps, mean.finite.values))
    bar = np.maximum(limit("spread_absolute"), limit("spread_relative") * scale)
    found = spans(np.nan_to_num(curve.values, nan=1.0) <= bar, 4, 5)
    if not found:
        return None
    span = joined(found)
    level = float(np.median(scale[span.first : span.last + 1]))
    differ = float(np.median(curve.values[span.first : span.last + 1]))
    text = (
        f"rewards of a step differ by {differ:.2g} around a mean of {level:.3g} from step "
        f"{int(curve.steps[span.first])} to {int(curve.steps[span.last])}"
    )
    return "alarm", curve, span, text, name


def _at_the_top(table: Table, step: int) -> bool:
    """The mean reward had risen, clearly, to the highest it has been."""
    mean = table.curve("reward/mean")
    if mean is None or len(mean.finite) < 10:
        return False
    before = mean.between(int(mean.steps[0]), step).finite.values
    if len(before) < 10:
        return False
    start, now = float(np.median(before[:START])), float(np.median(before[-3:]))
    return now > start and now >= float(np.max(before)) - 0.1 * (float(np.max(before)) - start)


def volatile(table: Table, facts: Facts) -> Seen | None:
    """The mean reward jumps by more than drawing other prompts and answers explains."""
    mean, std = table.curve("reward/mean"), table.curve("reward/std")
    if mean is None or std is None or len(mean.finite) < 20:
        return None
    values, spread = mean.finite.values, float(np.median(std.finite.values)) if len(std.finite) else 0.0
    episodes = table.episodes or facts.rollout_batch
    # Answers to one prompt are alike: it is prompts that are drawn.
    drawn = 1.0 if episodes is None else max(1.0, episodes / (facts.rollouts_per_prompt or 1))
    expected = spread / np.sqrt(drawn)
    moved = noise(values[-60:])
    if expected <= 0 or moved <= limit("volatile") * expected:
        return None
    text = (
        f"from step to step the mean reward jumps by {moved * np.sqrt(2):.3g}, {moved / expected:.1f} times what "
        f"{drawn:.0f} prompts of spread {spread:.3g} explain"
    )
    last = len(mean.finite) - 1
    span = Span(first=max(0, last - 59), named=last, last=last, since=max(0, last - 59))
    return seen("warning", mean.finite, span, text, "reward/mean")


HELD_OUT = ("eval/accuracy", "eval/pass_at_k", "eval/reward")


def hacking(table: Table, facts: Facts) -> Seen | None:
    """Training reward rises, and what is held out falls or stays."""
    mean, held = table.curve("reward/mean"), table.curve(*HELD_OUT)
    if mean is None or held is None or len(mean.finite) < 8 or len(held.finite) < 3:
        return None
    name = next(key for key in HELD_OUT if table.curves.get(key) is held)
    values, evals = mean.finite, held.finite
    spread = _spread_at_start(table, values)
    start, now = float(evals.values[0]), float(np.median(evals.values[-2:]))
    error, top = _error_of(evals.values, name), int(np.argmax(evals.values))
    best = float(evals.values[top])
    # The best of several evaluations is partly luck, so the fall from it has to be larger.
    fell = start - now > max(limit("hacking_fall") * abs(start), 2.5 * error)
    fell_from_best = best - now > max(limit("hacking_fall") * abs(best), 4 * error)
    stays = name != "eval/reward" and len(evals) >= 5 and now < start
    if not (fell or fell_from_best or stays):
        return None
    since = values if fell or not fell_from_best else values.between(int(evals.steps[top]), table.last)
    rise = risen(since, START)
    if rise is None or rise.p > limit("hacking_p") or rise.change < limit("hacking_rise") * spread:
        return None
    if not (fell or fell_from_best) and rise.change < 2 * spread:
        return None
    severity: Severity = "alarm" if fell or fell_from_best else "warning"
    words = "fell" if severity == "alarm" else "did not follow"
    times = rise.change / spread if spread else 0.0
    text = (
        f"the training reward rose by {rise.change:.3g} ({times:.1f} times its spread at the start; p = {rise.p:.2g}) "
        f"while {name} {words}: {start:.3g} at first, {best:.3g} at best, {now:.3g} now"
    )
    return Seen(
        severity=severity,
        first=int(evals.steps[top]),
        named=int(evals.steps[_first_low(evals.values, now)]),
        last=table.last,
        since=int(evals.steps[top]),
        evidence=text,
        series=name,
    )


def _first_low(values: np.ndarray, now: float) -> int:
    """Index of the first two evaluations in a row, the second of them, that were as low as the newest are."""
    low = values <= max(now, 0.0) + 1e-9 if now <= 0 else values <= 1.1 * now
    both = np.flatnonzero(low[1:] & low[:-1])
    return int(both[0]) + 1 if len(both) else len(values) - 1


def _spread_at_start(table: Table, mean: Curve) -> float:
    std = table.curve("reward/std")
    found = None if std is None else start_of(std)
    return noise(mean.values) if found is None else found


def _error_of(values: np.ndarray, name: str) -> float:
    """Standard error of one evaluation: of a share of some 50 answers at least, or from its own jumps."""
    if name in ("eval/accuracy", "eval/pass_at_k"):
        share = float(np.clip(np.median(values), 0.02, 0.98))
        return float(np.sqrt(share * (1 - share) / 50))
    return noise(values)
