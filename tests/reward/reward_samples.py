"""Samples and a component with given outcomes, for the reward tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from klimb.reward.base import ABSTAINED, Outcome
from klimb.types import Prompt, Sample


def make_sample(
    text: str = "text",
    *,
    answer: str | None = None,
    prompt: str = "question",
    prompt_ids: tuple[int, ...] = (1, 3),
    response_ids: tuple[int, ...] = (4, 5),
    row: int = 0,
    source: str = "rows.jsonl",
    finish_reason: Any = "stop",
    extra: dict[str, Any] | None = None,
) -> Sample:
    ids = prompt_ids + response_ids
    mask = (False,) * len(prompt_ids) + (True,) * len(response_ids)
    return Sample(
        prompt=Prompt(row=row, text=prompt, token_ids=prompt_ids, answer=answer, source=source, extra=extra or {}),
        index=0,
        token_ids=ids,
        mask=mask,
        logprobs=tuple(-0.5 if m else 0.0 for m in mask),
        policy_version=tuple(0 if m else -1 for m in mask),
        finish_reason=finish_reason,
        text=text,
    )


@dataclass(frozen=True, kw_only=True)
class Given:
    """A component whose outcomes are written down in the test: a number, None to abstain, or an Outcome."""

    values: Sequence[float | Outcome | None]
    name: str = "given"
    weight: float = 1.0
    verifies: bool = False

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        assert len(samples) == len(self.values)
        return [_outcome(value) for value in self.values]

    def close(self) -> None:
        return None


def _outcome(value: float | Outcome | None) -> Outcome:
    if isinstance(value, Outcome):
        return value
    return ABSTAINED if value is None else Outcome(value=value)
