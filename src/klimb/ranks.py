"""Several processes that run the same program: who works on what, and how their parts become one again.

The batch is global: every rank has all rows of a phase, so that filtering, whitening and token counts are the same
everywhere by construction. Only sampling, rewards, forwards and backwards are divided. One process is one rank, and
then nothing here costs or changes anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from klimb.errors import KlimbError

if TYPE_CHECKING:  # whoever only reads a run folder does without torch
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One forward of this rank: the rows [n] it reads. A filler keeps the ranks in step and counts for nothing."""

    rows: Tensor
    is_filler: bool = False


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's number, from 0, among `size`. Every method is called by all ranks, in the same order. stop: a file
    that tells started ranks to end, None where nobody else listens for them."""

    rank: int = 0
    size: int = 1
    stop: Path | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's neighbours among the items: answers to one prompt stay together where they can."""
        n = len(items)
        return items[self.rank * n // self.size : (self.rank + 1) * n // self.size]

    def everywhere(self, compute: Callable[[], Sequence[T]]) -> list[T]:
        """What all ranks computed, in their order. An error of one rank is raised on all: none is left waiting."""
        if self.size == 1:
            return list(compute())
        import torch.distributed as dist

        own: Sequence[T] | Exception
        try:
            own = compute()
        except Exception as error:
            own = _portable(error)
        parts: list[Sequence[T] | Exception | None] = [None] * self.size
        dist.all_gather_object(parts, own)
        for part in parts:
            if isinstance(part, Exception):
                raise part
        return [item for part in cast(list[Sequence[T]], parts) for item in part]

    def first(self, compute: Callable[[], T]) -> T:
        """What the first rank computed, and it alone; its error is raised on all."""
        if self.size == 1:
            return compute()
        return self.everywhere(lambda: [compute()] if self.is_first else [])[0]

    def turns(self, parts: Sequence[Tensor]) -> list[Turn]:
        """This rank's forwards of the parts, each int64 [n] of rows. All ranks have as many: whoever has none left
        reads the first row once more, for nothing."""
        own = [Turn(rows=rows) for rows in parts[self.rank :: self.size]]
        if len(own) < -(-len(parts) // self.size):
            own.append(Turn(rows=parts[0][:1], is_filler=True))
        return own

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' tensors added up, in place. Rows that only one rank filled come out as they are."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(x)
        return x

    def totals(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value added up over the ranks, which all have the same names in the same order."""
        return self._reduced(values, "SUM")

    def largest(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value's maximum over the ranks, which all have the same names in the same order."""
        return self._reduced(values, "MAX")

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag if self.size == 1 else self.largest({"": float(flag)})[""] > 0

    def _reduced(self, values: Mapping[str, float], how: str) -> dict[str, float]:
        if self.size == 1 or not values:
            return dict(values)
        import torch
        import torch.distributed as dist

        numbers = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(numbers, getattr(dist.ReduceOp, how))
        return dict(zip(values, numbers.tolist(), strict=True))


def _portable(error: Exception) -> Exception:
    """The error, or what it says where it cannot go to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever keeps it from being sent
        return KlimbError(f"{type(error).__name__}: {error}")
    return error


ALONE = Ranks()
