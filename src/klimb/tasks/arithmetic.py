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

# The demonstrations forget the carry (a column is added up without it), get a column's sum wrong, and lose the format
# of the end, with these probabilities. A carry of 1 comes up in somewhat under half of the columns that have one, so
# about half of the demonstrations are right, and no single slip is likelier than the right turn.
FORGET = 0.5
STEP_NOISE = 0.03
FORMAT_NOISE = 0.03
STEP_OFFSETS = (-2, -1, 1, 2)

FORMAT_VALUE = 0.1
STEP_VALUE = 0.15  # three of them
ANSWER_VALUE = 0.45

# A full response has about 80 characters. Longer than this is not an answer, and is not read at all.
MAX_CHARS = 200
MAX_LINES = 8
_STEP = re.compile(r"(ones|tens|hundreds): [0-9](?:\+[0-9]){1,2}=[0-9]{1,2} carry [0-9]")
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
        num_right = sum(a == b for a, b in zip(steps, _right(*_addends(extra))[0], strict=False))
        in_format = (
            given is not None
            and len(lines) == len(COLUMNS) + 1
            and all(_is_step(line, column) for line, column in zip(steps, COLUMNS, strict=True))
        )
        correct = given is not None and given[1] == answer
        value = FORMAT_VALUE * in_format + STEP_VALUE * num_right + ANSWER_VALUE * correct
        return Verdict(value=min(1.0, value), correct=correct)

    def demonstration(self, row: TaskRow, rng: Random) -> str:
        """Carries forgotten, sums now and then off by one or two, the error carried on, the end sometimes malformed."""
        offsets = [rng.choice(STEP_OFFSETS) if rng.random() < STEP_NOISE else 0 for _ in COLUMNS]
        forgotten = [rng.random() < FORGET for _ in COLUMNS]
        lines, total = _write(*_addends(row.extra), offsets, forgotten)
        if rng.random() >= FORMAT_NOISE:
            return "\n".join([*lines, f"answer: {total}"])
        return "\n".join([*lines, rng.choice((total, f"so {total}", f"answer: {total}\nok"))])

    def clean(self, row: TaskRow, rng: Random) -> str:
        """Every column right."""
        lines, total = _right(*_addends(row.extra))
        return "\n".join([*lines, f"answer: {total}"])


def _is_step(line: str, column: str) -> bool:
    match = _STEP.fullmatch(line)
    return match is not None and match[1] == column


def _addends(extra: dict[str, Any]) -> tuple[int, int]:
    return int(extra["a"]), int(extra["b"])


def _right(a: int, b: int) -> tuple[list[str], str]:
    return _write(a, b, [0] * len(COLUMNS), [False] * len(COLUMNS))


def _write(a: int, b: int, offsets: list[int], forgotten: list[bool]) -> tuple[list[str], str]:
    """The column lines, and the total that they lead to; column i is off by offsets[i], or added without its carry."""
    lines: list[str] = []
    digits = ""
    carry: int | None = None
    for column, offset, forgets in zip(COLUMNS, offsets, forgotten, strict=True):
        addends = [a % 10, b % 10] if carry is None or forgets else [a % 10, b % 10, carry]
        # A sum of 0 or 1 has nothing small enough below it, so there the slip goes upwards.
        column_sum = sum(addends) + (offset if sum(addends) + offset >= 0 else -offset)
        carry, digit = divmod(column_sum, 10)
        lines.append(f"{column}: {'+'.join(map(str, addends))}={column_sum} carry {carry}")
        digits = str(digit) + digits
        a, b = a // 10, b // 10
    return lines, digits if not carry else f"{carry}{digits}"


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
