"""Components that are plain arithmetic on the text, run in process: exact_answer, length, built-in tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from klimb.errors import KlimbError
from klimb.reward.answers import AnswerIn, extract, gold_answer, same_answer
from klimb.reward.base import ABSTAINED, Outcome, failed, valued, verdict
from klimb.reward.worker_side import describe
from klimb.tasks.table import load_task

if TYPE_CHECKING:
    from klimb.types import Sample


@dataclass(frozen=True, kw_only=True)
class ExactAnswer:
    """1 when the graded piece of the response is the row's answer (answers.same_answer), else 0.

    A response without such a piece gets 0. Abstains where the row has no answer.
    """

    name: str
    weight: float
    answer_in: AnswerIn
    tag: str
    verifies: bool = True

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> Outcome:
        answer = sample.prompt.answer
        if answer is None or not answer.strip():
            return ABSTAINED
        piece = extract(sample.text, self.answer_in, self.tag)
        return verdict(bool(piece) and same_answer(piece or "", gold_answer(answer)))

    def close(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Length:
    """A penalty for length, between 0 and -1, without a verdict.

    max: 0 up to max, then -(n - max) / max, down to -1 at twice max and beyond.
    target: -|n - target| / target, down to -1 at an empty response or at twice target and beyond.
    Exactly one of the two is set. unit: sampled tokens, or characters of the text.
    """

    name: str
    weight: float
    target: int | None
    max: int | None
    unit: Literal["tokens", "chars"]
    verifies: bool = False

    def __post_init__(self) -> None:
        assert (self.target is None) != (self.max is None)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [valued(self._one(s.num_response_tokens if self.unit == "tokens" else len(s.text))) for s in samples]

    def _one(self, n: int) -> float:
        if self.target is not None:
            return -min(1.0, abs(n - self.target) / self.target)
        assert self.max is not None
        return -min(1.0, max(0, n - self.max) / self.max)

    def close(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class TaskVerifier:
    """A built-in task's own verifier. task: its name, None to take it from where each row came from.

    graded: the task's own value, such as the share of constraints kept; otherwise 1 for a right answer, else 0.
    """

    name: str
    weight: float
    task: str | None
    graded: bool = True
    verifies: bool = True

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> Outcome:
        prompt = sample.prompt
        spec = prompt.source if self.task is None else f"task:{self.task}"
        if not spec.startswith("task:"):
            return failed("error", f"the row came from {spec}, not from task:NAME; name the task in args")
        try:
            judged = load_task(spec).score(sample.text, prompt.answer, prompt.extra)
        except KlimbError:
            raise
        except Exception as error:
            return failed("error", describe(error))
        return valued(judged.value, judged.correct) if self.graded else verdict(judged.correct)

    def close(self) -> None:
        return None
