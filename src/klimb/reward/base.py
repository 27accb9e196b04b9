"""What a reward component is and what it may say about one row. Light: imported by the worker processes too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from klimb.types import Sample

FailureKind = Literal["error", "timeout", "non_finite", "abstained", "empty"]

# Scores end in a float32 tensor; what is larger would turn into inf there.
LARGEST = 3.4028234663852886e38


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a row got no score.

    kind: error (it raised, crashed or answered nonsense), timeout, non_finite (NaN, inf, or beyond float32),
    abstained (nothing that counts gave a value), empty (the response has no token to reward).
    detail: the exception or what was found, for a person.
    """

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one component said about one row: a finite value, nothing (value None: it abstains), or a failure.

    correct: the verdict, None when the component gave none.
    """

    value: float | None = None
    correct: bool | None = None
    failure: Failure | None = None


ABSTAINED = Outcome()


def failed(kind: FailureKind, detail: str) -> Outcome:
    return Outcome(failure=Failure(kind=kind, detail=detail))


def verdict(correct: bool) -> Outcome:
    """1 for right, 0 for wrong."""
    return Outcome(value=float(correct), correct=correct)


def valued(value: float, correct: bool | None = None) -> Outcome:
    """A value, or a failure of kind non_finite when no float32 can hold it."""
    if not math.isfinite(value) or abs(value) > LARGEST:
        return failed("non_finite", f"the value is {value}")
    return Outcome(value=value, correct=correct)


def outcome_of(result: Any) -> Outcome:
    """Read what a user's function returned.

    A bool is a verdict, None abstains, a number is a value, and a dict has the keys value and, if it likes,
    correct. Anything else is a failure of kind error.
    """
    if isinstance(result, dict):
        result = cast(dict[Any, Any], result)
        unknown = [str(key) for key in result if key not in ("value", "correct")]
        if unknown or "value" not in result:
            return failed("error", f"returned a dict with the keys {list(result)}; allowed are value and correct")
        correct = result.get("correct")
        if correct is not None and not _is_bool(correct):
            return failed("error", f"returned correct = {correct!r:.80}; allowed are True, False and None")
        read = outcome_of(result["value"])
        verdict_given = read.correct if correct is None else bool(correct)
        return Outcome(value=read.value, correct=verdict_given, failure=read.failure)
    if result is None:
        return ABSTAINED
    if _is_bool(result):
        return verdict(bool(result))
    # numpy and torch scalars have __float__ as well; text has not, so "0.5" is never taken for a number.
    if not hasattr(result, "__float__"):
        return failed(
            "error", f"returned {type(result).__name__} {result!r:.80}; allowed are a number, bool, None, dict"
        )
    return valued(float(result))


def _is_bool(x: Any) -> bool:
    # numpy's own bool is no subclass of ours; numpy is not imported here just to name its type.
    return isinstance(x, bool) or type(x).__name__ in ("bool", "bool_")


class RewardComponent(Protocol):
    """One summand of the score."""

    @property
    def name(self) -> str:
        """Unique among the components of a run: the key in `Scored.parts` and the metric reward/<name>."""
        ...

    @property
    def weight(self) -> float: ...

    @property
    def verifies(self) -> bool:
        """Whether its outcomes may carry a verdict."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome per sample, in order. A bad row is a failure in its place and raises nothing."""
        ...

    def close(self) -> None:
        """Let go of what it holds alone; a pool that several components share stays open."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """How components become one score.

    on_failure: drop leaves a failed episode out; a number stands in for its final score.
    max_failed_fraction: in [0, 1]; a batch with a larger share of failed rows stops the run.
    normalize: running divides by the moments of every score so far. clip: lowest and highest score, None is off.
    """

    on_failure: Literal["drop"] | float = "drop"
    max_failed_fraction: float = 0.1
    normalize: Literal["none", "running"] = "none"
    clip: tuple[float, float] | None = None
