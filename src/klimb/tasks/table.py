"""Which data spec names which task."""

from __future__ import annotations

from difflib import get_close_matches

from klimb.errors import DataError
from klimb.tasks.arithmetic import Arithmetic
from klimb.tasks.base import Task, TaughtTask
from klimb.tasks.gym import load_gym
from klimb.tasks.instructions import Instructions

TASKS: dict[str, TaughtTask] = {
    "arithmetic": Arithmetic(),
    "instructions": Instructions(),
}


def load_task(spec: str) -> Task:
    """The task of a data spec: task:NAME for a built-in one, gym:NAME for a reasoning-gym data set.

    Raises DataError for a spec that names nothing, MissingExtra where reasoning-gym is needed and absent.
    """
    kind, _, name = spec.partition(":")
    if kind == "gym" and name:
        return load_gym(name)
    if kind == "task" and name in TASKS:
        return TASKS[name]
    allowed = [f"task:{known}" for known in TASKS]
    near = get_close_matches(spec, allowed, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise DataError(f"'{spec}' is no task. {hint}Allowed are {', '.join(allowed)} and gym:NAME.")
