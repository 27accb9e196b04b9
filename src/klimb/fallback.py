"""Smaller micro-batches when an update runs out of memory, instead of an end.

The loss of a train batch does not depend on how it is cut, so a step that failed is done again in halves: the same
gradient, but for rounding. What was accumulated before the failure is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from klimb.batch import Minibatch
from klimb.malloc import give_back, is_exhausted

T = TypeVar("T")


def _quiet(text: str) -> None:
    """Say nothing."""


@dataclass
class Fallback:
    """on: whether to try again at all. say: told the first time. halvings: how often so far; they last for as long as
    the process does."""

    on: bool = False
    say: Callable[[str], None] = field(default=_quiet)
    halvings: int = 0

    def cut(self, micros: Sequence[Tensor]) -> Minibatch:
        """The micro-batches, each halved as often as was needed so far; one row stays one."""
        return halved(micros, self.halvings)

    def attempt(self, micros: Minibatch, work: Callable[[Minibatch], T], undo: Callable[[], None]) -> T:
        """What `work` gives for the micro-batches, which are halved until it does not run out of memory. undo: called
        before another attempt."""
        while True:
            now = self.cut(micros)
            try:
                return work(now)
            except (MemoryError, RuntimeError) as error:
                if not self.on or not is_exhausted(error) or all(len(rows) <= 1 for rows in now):
                    raise
            # Not in the handler: the error holds the frames of the attempt, and with them its tensors.
            undo()
            give_back()
            if self.halvings == 0:
                rows = max(len(part) for part in now)
                self.say(
                    f"memory ran out in the update with micro-batches of up to {rows} rows; they are halved for the "
                    "rest of this run (training.micro_batch_fallback), the train batch stays the same"
                )
            self.halvings += 1

    def metrics(self) -> dict[str, Any]:
        """`update/micro_halvings`, where it is on."""
        return {"update/micro_halvings": self.halvings} if self.on else {}


def halved(micros: Sequence[Tensor], times: int) -> Minibatch:
    """Every part cut in two, `times` times over; the first half is the larger one."""
    out = tuple(micros)
    for _ in range(times):
        out = tuple(half for rows in out for half in rows.split(max(1, (len(rows) + 1) // 2)))
    return out


def kept(state: Any) -> Callable[[], None]:
    """What puts an object's attributes back to what they are now."""
    before = deepcopy(vars(state))

    def put_back() -> None:
        vars(state).update(deepcopy(before))

    return put_back
