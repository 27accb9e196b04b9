"""Requests divided among ranks: each rank's own engine answers its share, and all get all answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from klimb.ranks import Ranks
from klimb.rollout.base import Progress, Request, Sampler, Sampling
from klimb.types import Sample


@dataclass(frozen=True)
class DividedSampler:
    """A Sampler that all ranks ask for the same."""

    engine: Sampler
    ranks: Ranks

    def load_weights(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.engine.load_weights(named_tensors, version)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Sample]:
        return self.ranks.everywhere(lambda: self.engine.generate(self.ranks.share(requests), sampling, progress))

    def sleep(self) -> None:
        self.engine.sleep()

    def close(self) -> None:
        self.engine.close()
