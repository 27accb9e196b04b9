"""Pairs of responses to one prompt, better and worse by the task's verifier, for the reward model."""

from __future__ import annotations

from random import Random

from klimb.tasks.base import TaskRow, TaughtTask

SLIP_SHARE = 0.5
GRADED_SHARE = 0.2
MAX_DRAWS = 20


def draw_pair(task: TaughtTask, row: TaskRow, other: TaskRow, rng: Random) -> tuple[str, str]:
    """(better, worse) responses to `row`; `other` is another row of the task, whose response is borrowed.

    Half are a clean response against a teacher's slip, a fifth two demonstrations of different value, so
    that scores are graded, and the rest a clean response against a trick that a policy may find.
    """
    share = rng.random()
    for _ in range(MAX_DRAWS):
        # The same seed twice: a clean response and a demonstration that differs from it in its slips alone.
        seed = rng.getrandbits(64)
        better = task.clean(row, Random(seed))
        if share < SLIP_SHARE:
            worse = task.demonstration(row, Random(seed))
        elif share < SLIP_SHARE + GRADED_SHARE:
            better, worse = task.demonstration(row, rng), task.demonstration(row, rng)
        else:
            worse = trick(better, task.clean(other, rng), rng)
        values = [task.score(text, row.answer, row.extra).value for text in (better, worse)]
        if values[0] != values[1]:
            return (better, worse) if values[0] > values[1] else (worse, better)
    return task.clean(row, rng), ""


def trick(text: str, borrowed: str, rng: Random) -> str:
    """One of: cut off, empty, a line dropped, doubled or moved, more text after the end, another prompt's response or
    its last line, a digit changed somewhere or in the last line."""
    lines = text.split("\n")
    i = rng.randrange(len(lines))
    kind = rng.randrange(9)
    if kind == 0:
        return text[: rng.randrange(len(text))]
    if kind == 1:
        return "\n".join(lines[:i] + lines[i + 1 :])
    if kind == 2:
        return "\n".join(lines[: i + 1] + lines[i:])
    if kind == 3:
        return "\n".join([*lines, *[lines[-1]] * rng.randint(1, 4)])
    if kind == 4:
        return "\n".join([*lines, rng.choice(borrowed.split("\n"))])
    if kind == 5:
        return borrowed
    if kind == 6:
        return "\n".join([*lines[:-1], borrowed.split("\n")[-1]])
    if kind == 7:
        return _change_digit(text, 0, rng)
    return _change_digit(text, len(text) - len(lines[-1]), rng)


def _change_digit(text: str, start: int, rng: Random) -> str:
    """One digit from position `start` on replaced by another; text without digits comes back as it is."""
    places = [i for i in range(start, len(text)) if text[i].isdigit()]
    if not places:
        return text
    i = rng.choice(places)
    return text[:i] + rng.choice([d for d in "0123456789" if d != text[i]]) + text[i + 1 :]
