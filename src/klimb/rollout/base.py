"""What the loop asks of an engine that samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from klimb.types import Prompt, Sample

Progress = Callable[[int, int], None]
"""Called with episodes done and episodes in all."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response wanted. index: its row in the phase; seed fixes its text whatever the batch around it."""

    prompt: Prompt
    index: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. end_ids: ids that end a response; stop_strings: texts that do.

    temperature 0 is greedy; its recorded log-probs are those at temperature 1.
    """

    temperature: float
    max_tokens: int
    end_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0


class Sampler(Protocol):
    """An engine. The same requests with the same seeds give the same text, but for floating-point ties."""

    def load_weights(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take over the policy's weights; every token sampled from now on carries this version."""
        ...

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Sample]:
        """One sample per request, in the order of the requests."""
        ...

    def sleep(self) -> None:
        """Nothing is asked until the next `load_weights`: memory that only sampling needs may go."""
        ...

    def close(self) -> None:
        """Let go of everything that the engine holds; it samples no more."""
        ...
