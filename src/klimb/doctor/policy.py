"""The update itself: ratios to the old policy, the engine that sampled, entropy, numbers that are none."""

from __future__ import annotations

import numpy as np

from klimb.doctor.finding import Facts, Seen, Severity
from klimb.doctor.limits import limit
from klimb.doctor.stats import Span, joined, rolling_median, spans
from klimb.doctor.table import Curve, Flags, Floats, Table

START = 5
"""Values whose median is what a run started from."""


def seen(severity: Severity, curve: Curve, span: Span, text: str, series: str, variant: str = "") -> Seen:
    return Seen(
        severity=severity,
        first=int(curve.steps[span.first]),
        named=int(curve.steps[span.named]),
        last=int(curve.steps[span.last]),
        since=int(curve.steps[span.since]),
        evidence=text,
        series=series,
        variant=variant,
    )


def first_of(levels: dict[Severity, list[Span]]) -> tuple[Severity, Span] | None:
    """The first stretch of the worst level that has any, ending where the last one of that level does."""
    for severity, found in levels.items():
        if found:
            return severity, joined(found)
    return None


def ratio_spikes(table: Table, facts: Facts) -> Seen | None:
    """Mean |r - 1|, the KL from old to new policy, or the share of clipped tokens, whichever is there and worst."""
    best: Seen | None = None
    for name, curve, warn, alarm, words in _step_sizes(table):
        values = np.where(np.isfinite(curve.values), curve.values, 0.0)
        found = first_of({"alarm": spans(values > alarm, 2, 3), "warning": spans(values > warn, 3, 5)})
        if found is None:
            continue
        severity, span = found
        part = values[span.first : span.last + 1]
        at = int(curve.steps[span.first + int(np.argmax(part))])
        text = f"{words} {float(np.max(part)):.3g} at step {at} (usual: under {warn:g})"
        largest = table.curve("policy/ratio_max")
        if largest is not None and len(largest.finite):
            text += f"; the largest ratio of a token was {float(np.max(largest.finite.values)):.3g}"
        now = seen(severity, curve, span, text, name)
        if best is None or (now.severity == "alarm", -now.named) > (best.severity == "alarm", -best.named):
            best = now
    return best


def _step_sizes(table: Table) -> list[tuple[str, Curve, float, float, str]]:
    out: list[tuple[str, Curve, float, float, str]] = []
    for name, key, words in (
        ("policy/ratio_abs_dev", "ratio", "within a phase the probability ratio moved by"),
        ("policy/approx_kl", "approx_kl", "within a phase the KL from old to new policy reached"),
    ):
        if (curve := table.curve(name)) is not None:
            out.append((name, curve, limit(f"{key}_warning"), limit(f"{key}_alarm"), words))
    low, high = table.curve("policy/clip_fraction_low"), table.curve("policy/clip_fraction_high")
    both = table.curve("policy/clip_fraction")
    if low is not None and high is not None and len(low) == len(high):
        both = Curve(steps=low.steps, values=low.values + high.values)
    if both is not None:
        words = "share of tokens whose ratio was clipped:"
        out.append(("policy/clip_fraction_high", both, limit("clipped_warning"), limit("clipped_alarm"), words))
    return out


def engine_mismatch(table: Table, facts: Facts) -> Seen | None:
    """The engine that sampled and the trainer give the same tokens other probabilities."""
    for name, key, words in (
        ("mismatch/kl", "engine_kl", "the mean log-prob difference between engine and trainer is"),
        ("mismatch/k3", "engine_k3", "the KL between engine and trainer (k3) is"),
        ("mismatch/probs_diff_mean", "engine_probs", "the mean difference of token probabilities is"),
        ("mismatch/logprob_diff_mean", "engine_logprobs", "the mean size of the log-prob differences is"),
        ("mismatch/ess", "engine_ess", "the effective share of tokens under the engine's weights is"),
    ):
        curve = table.curve(name)
        if curve is None:
            continue
        values = np.abs(np.where(np.isnan(curve.values), 0.0 if key != "engine_ess" else 1.0, curve.values))
        bad = values < limit(key) if key == "engine_ess" else values > limit(key)
        found = spans(bad, 2, 3)
        if not found:
            continue
        span = joined(found)
        level = float(np.nanmedian(curve.values[span.first : span.last + 1]))
        signed = f"{level:+.3g}" if key == "engine_kl" else f"{level:.3g}"
        text = (
            f"{words} {signed} from step {int(curve.steps[span.first])} on (sound engines: "
            f"{'over' if key == 'engine_ess' else 'under'} {limit(key):g})"
        )
        other = table.curve("mismatch/probs_diff_mean")
        if other is not None and name != "mismatch/probs_diff_mean" and len(other.finite):
            text += f"; probabilities differ by {float(np.median(other.finite.values)):.3g} on average"
        return seen("alarm", curve, span, text, name)
    return None


def start_of(curve: Curve) -> float | None:
    """What the series started from; None without a finite value."""
    values = curve.finite.values[:START]
    return float(np.median(values)) if len(values) else None


def _entropy(table: Table) -> tuple[Curve, Floats, float] | None:
    """The series, its values smoothed, and what they started from."""
    curve = table.curve("policy/entropy")
    start = None if curve is None else start_of(curve)
    if curve is None or start is None:
        return None
    return curve, rolling_median(np.where(np.isfinite(curve.values), curve.values, start), 3), start


def entropy_collapse(table: Table, facts: Facts) -> Seen | None:
    entropy = _entropy(table)
    if entropy is None:
        return None
    curve, values, start = entropy
    floor = max(limit("entropy_low"), limit("entropy_fall") * start)
    from_start = start < limit("entropy_low")
    found = spans(values < floor, 4, 5)
    if not found:
        return None
    span = joined(found)
    low = float(np.min(values[span.first : span.last + 1]))
    text = (
        f"entropy is {low:.2g} nats per token from the first step on: almost every answer to a prompt is the same"
        if from_start
        else f"entropy fell from {start:.3g} to {low:.2g} nats per token by step {int(curve.steps[span.first])}"
    )
    severity: Severity = "warning" if _solved(table) else "alarm"
    return seen(severity, curve, span, text, "policy/entropy", "start" if from_start else "")


def _solved(table: Table) -> bool:
    """Rewards have come close to the best there is: a policy that is sure and right is no fault."""
    mean, top = table.curve("reward/mean"), table.curve("reward/max")
    if mean is None or top is None or len(mean.finite) < 10 or not len(top.finite):
        return False
    start, now, best = start_of(mean), float(np.median(mean.finite.values[-5:])), float(np.max(top.finite.values))
    return start is not None and best > start and now > best - 0.15 * abs(best - start)


def entropy_explosion(table: Table, facts: Facts) -> Seen | None:
    entropy = _entropy(table)
    if entropy is None:
        return None
    curve, values, start = entropy
    from_start = start > limit("entropy_high")
    bar = limit("entropy_high") if from_start else max(limit("entropy_rise") * start, limit("entropy_risen"))
    found = spans(values > bar, 3, 4)
    if not found:
        return None
    span = joined(found)
    high = float(np.max(values[span.first : span.last + 1]))
    temperature = "" if facts.temperature is None else f", at temperature {facts.temperature:g}"
    text = (
        f"entropy is {start:.3g} nats per token from the first step on{temperature}: answers are mostly chance"
        if from_start
        else f"entropy rose from {start:.3g} to {high:.3g} nats per token by step {int(curve.steps[span.last])}"
    )
    return seen("alarm", curve, span, text, "policy/entropy", "start" if from_start else "")


LOSSES = ("policy/loss", "policy/kl_loss", "policy/grad_norm", "value/loss", "value/grad_norm", "kl/k3", "kl/k1")


def nonfinite(table: Table, facts: Facts) -> Seen | None:
    """NaN or infinity in a loss, a gradient or the KL, and optimizer steps skipped because of it."""
    best: Seen | None = None
    for name in ("policy/skipped_steps", "value/skipped_steps"):
        curve = table.curve(name)
        if curve is None:
            continue
        bad = np.nan_to_num(curve.values, nan=1.0) > 0
        found = first_of({"alarm": spans(bad, 3, 5), "warning": spans(bad, 1, 1)})
        if found is not None:
            severity, span = found
            count = int(np.nansum(np.clip(curve.values, 0, 1e9)))
            text = (
                f"{count} optimizer step{'s were' if count != 1 else ' was'} skipped from step "
                f"{int(curve.steps[span.first])} to {int(curve.steps[span.last])}: a loss or a gradient was not finite"
            )
            best = seen(severity, curve, span, text, name)
            break
    if best is not None and best.severity == "alarm":
        return best
    for name in LOSSES:
        curve = table.curve(name)
        if curve is None:
            continue
        bad: Flags = ~np.isfinite(curve.values)
        found = spans(bad, 1, 1)
        if found:
            span = joined(found)
            shown: Floats = curve.values[bad]
            text = f"{name} was {shown[0]} at {len(shown)} step{'s' if len(shown) != 1 else ''}, first at step "
            return seen("alarm", curve, span, text + str(int(curve.steps[span.first])), name)
    return best
