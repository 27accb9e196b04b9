"""What a task is: rows of prompts in two disjoint splits, and a verifier that reads responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, Protocol, TypeVar

from klimb.errors import DataError

Split = Literal["train", "eval"]
Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One prompt of a task.

    prompt: what the user asks, without any chat template. answer: the reference solution, or None where many
    answers are right. extra: what else the verifier reads, plain JSON values only.
    """

    prompt: str
    answer: str | None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a verifier made of one response: value in [0, 1] is graded, correct is the whole thing right."""

    value: float
    correct: bool

    def __post_init__(self) -> None:
        assert 0.0 <= self.value <= 1.0, f"a verdict lies in [0, 1], got {self.value}"


WRONG = Verdict(value=0.0, correct=False)


class Task(Protocol):
    """Prompts with a verifier."""

    @property
    def name(self) -> str:
        """The data spec that loads it, such as task:arithmetic."""
        ...

    def rows(self, split: Split, limit: int | None = None) -> list[TaskRow]:
        """The first `limit` rows of a split, all of them for None.

        The same rows in every process; no prompt is in both splits; a smaller limit gives a prefix.
        """
        ...

    def score(self, response: str, answer: str | None, extra: dict[str, Any]) -> Verdict:
        """Judge a response to the row that `answer` and `extra` came from. Any text is safe to pass."""
        ...


class TaughtTask(Task, Protocol):
    """A task that can also write responses, so that a model can be taught on it."""

    def demonstration(self, row: TaskRow, rng: Random) -> str:
        """A response as a careless writer gives it: often flawed, each part right more often than not.

        From the same random state it chooses the same wording as `clean`, so that they differ in the slips alone.
        """
        ...

    def clean(self, row: TaskRow, rng: Random) -> str:
        """A response that scores 1."""
        ...


def first_rows(rows: Sequence[Row], limit: int | None) -> list[Row]:
    """The first `limit` rows; all for None. DataError when the limit is not a positive number."""
    if limit is not None and limit < 1:
        raise DataError(f"the number of task rows must be 1 or more, got {limit}. Leave it out to take all rows.")
    return list(rows[:limit])
