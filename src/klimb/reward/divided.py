"""A reward component divided among ranks: each scores its share of the samples, and all get all outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klimb.ranks import Ranks
from klimb.reward.base import Outcome, RewardComponent
from klimb.types import Sample


@dataclass(frozen=True)
class DividedComponent:
    """A RewardComponent that all ranks ask about the same samples."""

    component: RewardComponent
    ranks: Ranks

    @property
    def name(self) -> str:
        return self.component.name

    @property
    def weight(self) -> float:
        return self.component.weight

    @property
    def verifies(self) -> bool:
        return self.component.verifies

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return self.ranks.everywhere(lambda: self.component.score(self.ranks.share(samples)))

    def close(self) -> None:
        self.component.close()
