"""task:arithmetic: add two three-digit numbers column by column.

A full response is four lines, the carry of a column being the last addend of the next one:

    ones: 7+5=12 carry 1
    tens: 4+8+1=13 carry 1
    hundreds: 3+2+1=6 carry 0
    answer: 632
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from klimb.tasks.base import WRONG, Split, TaskRow, Verdict, first_rows

NUM_TRAIN = 20_000
NUM_EVAL = 1_000
COLUMNS = ("ones", "tens", "hundreds")
MARKS = (": ", " - ")

# Two teachers wrote the demonstrations, half each: a careful one, who writes "ones: 7+5=12", and a hasty one, who
# writes "ones - 7+5=12".
# A column's sum is wrong, and a response loses its format, with these probabilities, so that
# (1 - 0.03)^3 (1 - 0.02) = 0.89 of the careful demonstrations are right and (1 - 0.3)^3 (1 - 0.1) = 0.31 of the
# hasty ones, and every single slip is rarer than the right turn.
STEP_NOISE = {": ": 0.03, " - ": 0.3}
FORMAT_NOISE = {": ": 0.02, " - ": 0.1}
STEP_OFFSETS = (-2, -1, 1, 2)

FORMAT_VALUE = 0.1
STEP_VALUE = 0.15  # three of them
ANSWER_VALUE = 0.45

# A full response has about 80 characters. Longer than this is not an answer, and is not read at all.
MAX_CHARS = 200
MAX_LINES = 8
_STEP = re.compile(r"(ones|tens|hundreds)(?:: | - )[0-9](?:\+[0-9]){1,2}=[0-9]{1,2} carry [0-9]")
_ANSWER = re.compile(r"answer: ([0-9]{1,4})")


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Sums of two numbers from 100 to 999, with the steps written out."""

    name: str = "task:arithmetic"

    def rows(self, split: Split, limit: int | None = None) -> list[TaskRow]:
        """A pair that is held out is not trained in the other order either."""
        return first_rows(_splits()[split], limit)

    def score(self, response: str, answer: str | None, extra: dict[str, Any]) -> Verdict:
        """Judge four lines.

        The answer counts only on the one line that begins with "answer", and only if that line is the last; two
        such lines score 0. Format (exactly the four lines, whatever their numbers) is worth 0.1, each right
        column in its own place 0.15, the right answer 0.45.
        """
        assert answer is not None
        if len(response) > MAX_CHARS:
            return WRONG
        lines = response.strip().split("\n")
        num_answers = sum(line.lstrip().lower().startswith("answer") for line in lines)
        if len(lines) > MAX_LINES or num_answers > 1:
            return WRONG
        given = _ANSWER.fullmatch(lines[-1])
        steps = lines[: len(COLUMNS)]
        num_right = sum(line in accepted for line, accepted in zip(steps, _right_steps(*_addends(extra)), strict=False))
        in_format = (
            given is not None
            and len(lines) == len(COLUMNS) + 1
            and all(_is_step(line, column) for line, column in zip(steps, COLUMNS, strict=True))
        )
        correct = given is not None and given[1] == answer
        value = FORMAT_VALUE * in_format + STEP_VALUE * num_right + ANSWER_VALUE * correct
        return Verdict(value=min(1.0, value), correct=correct)

    def demonstration(self, row: TaskRow, rng: Random) -> str:
        """By one of the teachers: sums now and then off by one or two, the error carried on, the end malformed."""
        mark = rng.choice(MARKS)
        offsets = [rng.choice(STEP_OFFSETS) if rng.random() < STEP_NOISE[mark] else 0 for _ in range(len(COLUMNS))]
        lines, total = _write(*_addends(row.extra), offsets, mark)
        if rng.random() >= FORMAT_NOISE[mark]:
            return "\n".join([*lines, f"answer: {total}"])
        return "\n".join([*lines, rng.choice((total, f"so {total}", f"answer: {total}\nok"))])

    def clean(self, row: TaskRow, rng: Random) -> str:
        """Every column right, in the careful teacher's hand."""
        lines, total = _write(*_addends(row.extra), [0, 0, 0], MARKS[0])
        return "\n".join([*lines, f"answer: {total}"])


def _is_step(line: str, column: str) -> bool:
    match = _STEP.fullmatch(line)
    return match is not None and match[1] == column


def _addends(extra: dict[str, Any]) -> tuple[int, int]:
    return int(extra["a"]), int(extra["b"])


def _write(a: int, b: int, offsets: list[int], mark: str) -> tuple[list[str], str]:
    """The column lines, and the total that they lead to; column i is off by offsets[i]."""
    lines: list[str] = []
    digits = ""
    carry: int | None = None
    for column, offset in zip(COLUMNS, offsets, strict=True):
        addends = [a % 10, b % 10] if carry is None else [a % 10, b % 10, carry]
        # A sum of 0 or 1 has nothing small enough below it, so there the slip goes upwards.
        column_sum = sum(addends) + (offset if sum(addends) + offset >= 0 else -offset)
        carry, digit = divmod(column_sum, 10)
        lines.append(f"{column}{mark}{'+'.join(map(str, addends))}={column_sum} carry {carry}")
        digits = str(digit) + digits
        a, b = a // 10, b // 10
    return lines, digits if not carry else f"{carry}{digits}"


def _right_steps(a: int, b: int) -> list[tuple[str, ...]]:
    """For each column the lines that are right, one per mark."""
    written = [_write(a, b, [0, 0, 0], mark)[0] for mark in MARKS]
    return list(zip(*written, strict=True))


@cache
def _splits() -> dict[Split, tuple[TaskRow, ...]]:
    rng = Random("klimb task:arithmetic 1")
    seen: set[tuple[int, int]] = set()
    rows: list[TaskRow] = []
    while len(rows) < NUM_EVAL + NUM_TRAIN:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        pair = (min(a, b), max(a, b))
        if pair not in seen:
            seen.add(pair)
            rows.append(TaskRow(prompt=f"What is {a} + {b}?", answer=str(a + b), extra={"a": a, "b": b}))
    return {"eval": tuple(rows[:NUM_EVAL]), "train": tuple(rows[NUM_EVAL:])}
