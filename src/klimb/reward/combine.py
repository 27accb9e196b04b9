"""Components' outcomes -> one score per episode: weighted sum, running normalisation, clip, and what failed.

Two halves: `collect` asks the components, `finish` does everything that looks at the whole batch. `score_samples` is
both in a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from klimb.errors import RewardError
from klimb.reward.base import ABSTAINED, Failure, Outcome, RewardComponent, RewardSettings, valued
from klimb.types import Sample, Scored

# How many failures an error message lists.
LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample with its weighted sum, or why it has none. blame: the component that failed, "" if none alone."""

    sample: Sample
    parts: dict[str, float]
    correct: bool | None
    total: float | None
    failure: Failure | None
    blame: str


@dataclass(frozen=True, kw_only=True)
class RewardReport:
    """What a batch's rewards looked like.

    metrics: reward/mean, std (population), min, max over the final scores of the rows that did not fail, absent
    when all failed; reward/failed and reward/clipped, numbers of rows; reward/<component>, the mean of its raw
    values. counts: failed rows by kind. messages: one line per failed row, with its place in the batch.
    """

    metrics: dict[str, float]
    counts: dict[str, int]
    messages: tuple[str, ...]


class Moments:
    """Mean and population variance of all scores seen, in float64.

    Batches are merged by the pairwise update of Chan, Golub and LeVeque (1979), equations 2.1a and b. The state
    is plain numbers, and a run resumed from it goes on bit for bit.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0

    def update(self, values: Sequence[float]) -> None:
        if not values:
            return
        n = len(values)
        mean = math.fsum(values) / n
        m2 = math.fsum((x - mean) ** 2 for x in values)
        delta, count = mean - self.mean, self.count + n
        self.mean += delta * n / count
        self.m2 += m2 + delta * delta * self.count * n / count
        self.count = count

    @property
    def std(self) -> float:
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def normalize(self, value: float) -> float:
        """(value - mean) / std; 0 while all scores seen were the same, for then there is no scale yet."""
        # Equal scores leave rounding dust in m2, which must not be blown up to unit size.
        if self.std <= 1e-12 * max(1.0, abs(self.mean)):
            return 0.0
        return (value - self.mean) / self.std

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.m2 = int(state["count"]), float(state["mean"]), float(state["m2"])


def score_samples(
    samples: Sequence[Sample],
    components: Sequence[RewardComponent],
    settings: RewardSettings,
    moments: Moments | None,
    learn_moments: bool = True,
) -> tuple[tuple[Scored, ...], RewardReport]:
    """Score a whole batch. See `collect` and `finish`."""
    return finish(collect(samples, components), settings, moments, learn_moments)


def collect(samples: Sequence[Sample], components: Sequence[RewardComponent]) -> tuple[Row, ...]:
    """Ask every component about every sample that has a token to reward: score = sum_k weight_k * reward_k.

    A component without a value for a row abstains and counts 0 there. A row fails when one component failed,
    or when none with a weight other than 0 gave a value. Empty rows are shown to no component.
    """
    names = [component.name for component in components]
    assert len(set(names)) == len(names), f"reward components need names of their own: {names}"
    asked = [i for i, sample in enumerate(samples) if sample.num_response_tokens]
    columns: list[dict[int, Outcome]] = []
    for component in components:
        outcomes = component.score([samples[i] for i in asked])
        assert len(outcomes) == len(asked), f"{component.name}: {len(outcomes)} outcomes for {len(asked)} rows"
        columns.append(dict(zip(asked, outcomes, strict=True)))
    return tuple(_row(sample, components, [column.get(i) for column in columns]) for i, sample in enumerate(samples))


def _row(sample: Sample, components: Sequence[RewardComponent], outcomes: Sequence[Outcome | None]) -> Row:
    parts: dict[str, float] = {}
    correct: bool | None = None
    failure: Failure | None = None
    blame = ""
    counting = [c.weight for c in components if c.weight != 0.0]
    total, spoke = 0.0, False
    if not sample.num_response_tokens:
        failure = Failure(kind="empty", detail="the response has no token")
        return Row(sample=sample, parts=parts, correct=None, total=None, failure=failure, blame="")
    for component, given in zip(components, outcomes, strict=True):
        outcome = _finite(given or ABSTAINED)
        if component.verifies and correct is None:
            correct = outcome.correct
        if outcome.failure is not None and failure is None:
            failure, blame = outcome.failure, component.name
        if outcome.value is not None:
            parts[component.name] = outcome.value
            total += component.weight * outcome.value
            # Without this a value of weight 0 would turn "nobody knows" into a score of 0.
            spoke = spoke or component.weight != 0.0 or not counting
    if failure is None and not spoke:
        failure = Failure(kind="abstained", detail="no reward that counts gave a value")
    if failure is None:
        failure = valued(total).failure
    return Row(
        sample=sample,
        parts=parts,
        correct=correct,
        total=total if failure is None else None,
        failure=failure,
        blame=blame,
    )


def _finite(outcome: Outcome) -> Outcome:
    return outcome if outcome.value is None else valued(outcome.value, outcome.correct)


def finish(
    rows: Sequence[Row], settings: RewardSettings, moments: Moments | None, learn_moments: bool = True
) -> tuple[tuple[Scored, ...], RewardReport]:
    """Normalise, clip, place the scores and report, over the whole batch.

    moments: updated by this batch's sums, then used; None leaves the scores as they are, as evaluation wants it.
    learn_moments False: used as they stand, for scores that are a baseline and no sample of the policy.
    A failed row keeps its reason; with on_failure: drop it has no reward, with a number it has that number,
    which is neither normalised nor clipped, nor part of the moments and metrics. A row without a token has no
    place for a number and is always left out.
    Raises RewardError when more than max_failed_fraction of the rows failed.
    """
    messages = tuple(_message(place, row, row.failure) for place, row in enumerate(rows) if row.failure is not None)
    counts = dict(Counter(row.failure.kind for row in rows if row.failure is not None))
    if len(messages) > settings.max_failed_fraction * len(rows):
        raise RewardError(_too_many(len(rows), messages, settings.max_failed_fraction))
    totals = [row.total for row in rows if row.total is not None]
    if settings.normalize == "running" and moments is not None and learn_moments:
        moments.update(totals)
    final: list[float] = []
    clipped = 0
    scored: list[Scored] = []
    for row in rows:
        value = row.total
        if value is not None:
            if settings.normalize == "running" and moments is not None:
                value = moments.normalize(value)
            if settings.clip is not None:
                low, high = settings.clip
                clipped += not low <= value <= high
                value = min(max(value, low), high)
            final.append(value)
        elif settings.on_failure != "drop":
            value = float(settings.on_failure)
        scored.append(_scored(row, value))
    report = RewardReport(metrics=_metrics(rows, final, clipped), counts=counts, messages=messages)
    return tuple(scored), report


def _scored(row: Row, value: float | None) -> Scored:
    mask = row.sample.mask
    last = max((t for t in range(len(mask)) if mask[t]), default=None)
    failure = row.failure
    return Scored(
        sample=row.sample,
        rewards=() if value is None or last is None else ((last, value),),
        parts=row.parts,
        correct=row.correct,
        failure=None if failure is None else f"{row.blame}: {failure}" if row.blame else str(failure),
    )


def _metrics(rows: Sequence[Row], final: Sequence[float], clipped: int) -> dict[str, float]:
    metrics = {
        "reward/failed": float(sum(row.failure is not None for row in rows)),
        "reward/clipped": float(clipped),
    }
    if final:
        mean = math.fsum(final) / len(final)
        metrics["reward/mean"] = mean
        metrics["reward/std"] = math.sqrt(math.fsum((x - mean) ** 2 for x in final) / len(final))
        metrics["reward/min"] = min(final)
        metrics["reward/max"] = max(final)
    for name in dict.fromkeys(name for row in rows for name in row.parts):
        values = [row.parts[name] for row in rows if name in row.parts]
        metrics[f"reward/{name}"] = math.fsum(values) / len(values)
    return metrics


def _message(place: int, row: Row, failure: Failure) -> str:
    who = f"reward '{row.blame}': " if row.blame else ""
    return f"sample {place} (data row {row.sample.prompt.row} of {row.sample.prompt.source}): {who}{failure}"


def _too_many(num_rows: int, messages: tuple[str, ...], allowed: float) -> str:
    listed = "\n".join(f"  {message}" for message in messages[:LISTED])
    more = f"\n  and {len(messages) - LISTED} more" if len(messages) > LISTED else ""
    return (
        f"{len(messages)} of {num_rows} episodes got no reward; "
        f"reward_model.max_failed_fraction allows {allowed:g}.\n{listed}{more}\n"
        "Mend the reward, give it more reward_model.timeout_seconds, or allow more with "
        "reward_model.max_failed_fraction."
    )
