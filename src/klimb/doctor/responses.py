"""What the answers look like: longer, shorter, cut off, repeating themselves."""

from __future__ import annotations

import numpy as np

from klimb.doctor.finding import Facts, Seen, Severity
from klimb.doctor.limits import limit
from klimb.doctor.policy import START, first_of, seen
from klimb.doctor.stats import Span, joined, rolling_median, spans, trend
from klimb.doctor.table import Curve, Table


def length_drift(table: Table, facts: Facts) -> Seen | None:
    """The mean length doubled or halved, as a trend and not as a jump of a step."""
    curve = table.curve("length/mean")
    if curve is None or len(curve.finite) < 2 * START:
        return None
    finite = curve.finite
    start = float(np.median(finite.values[:START]))
    if start <= 0:
        return None
    ratio = rolling_median(finite.values, 5) / start
    by = limit("length_change")
    found = spans((ratio > by) | (ratio < 1 / by), 4, 5)
    if not found:
        return None
    span = joined(found)
    moved = trend(finite)
    if moved is None or (moved.p > 0.05 and span.last < len(finite) - 3):
        return None
    now = float(np.median(finite.values[span.first : span.last + 1]))
    word = "longer" if now > start else "shorter"
    text = f"answers became {word}: {start:.3g} tokens at first, {now:.3g} from step {int(finite.steps[span.first])} on"
    return seen("warning", finite, span, text, "length/mean", word)


def truncation(table: Table, facts: Facts) -> Seen | None:
    curve = table.curve("length/truncated")
    if curve is None:
        return None
    values = np.nan_to_num(curve.values)
    levels: dict[Severity, list[Span]] = {
        "alarm": spans(values > limit("truncated_alarm"), 4, 5),
        "warning": spans(values > limit("truncated_warning"), 8, 10),
    }
    found = first_of(levels)
    if found is None:
        return None
    severity, span = found
    share = float(np.median(values[span.first : span.last + 1]))
    bound = "" if facts.max_tokens is None else f" of {facts.max_tokens} tokens"
    text = (
        f"{share:.0%} of the answers reached the limit{bound} and were cut off, from step "
        f"{int(curve.steps[span.first])} to {int(curve.steps[span.last])}"
    )
    return seen(severity, curve, span, text, "length/truncated")


def repetition(table: Table, facts: Facts) -> Seen | None:
    """Answers that say the same again and again: '!!!!' is the shortest form of it."""
    curve = table.curve("text/repetition")
    if curve is None:
        return None
    finite: Curve = curve.finite
    if len(finite) < START:
        return None
    start = float(np.median(finite.values[:START]))
    values = rolling_median(finite.values, 3)
    levels: dict[Severity, list[Span]] = {
        "alarm": spans(values > max(limit("repetition_alarm"), 2 * start), 3, 4),
        "warning": spans(values > max(limit("repetition_warning"), 3 * start), 5, 6),
    }
    found = first_of(levels)
    if found is None:
        return None
    severity, span = found
    peak = float(np.max(values[span.first : span.last + 1]))
    text = (
        f"{peak:.0%} of an answer's 4-grams stand in it already, at step {int(finite.steps[span.last])}; it was "
        f"{start:.0%} at the start"
    )
    return seen(severity, finite, span, text, "text/repetition")
