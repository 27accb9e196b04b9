"""Components whose code may hang or crash, run in the worker pool: math, regex, gym verifiers, a user's function.

A user's function is written in a file of its own and named `path/file.py:function`:

    def reward(prompt: str, response: str, answer: str | None, **args) -> float | bool | None | dict

It is called by keyword, once per row. prompt and response are text without special tokens; answer is the
row's reference; args are the config's args, word for word. A number is the reward, a bool is a verdict worth 1
or 0, None abstains, and a dict {"value": ..., "correct": ...} gives a reward and a verdict apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klimb.errors import RewardError
from klimb.reward import worker_side
from klimb.reward.answers import AnswerIn, extract, gold_answer
from klimb.reward.base import ABSTAINED, Failure, Outcome, failed, verdict
from klimb.reward.workers import WorkerPool

if TYPE_CHECKING:
    from klimb.types import Sample


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """What these components share. pool is not theirs to close."""

    name: str
    weight: float
    pool: WorkerPool
    verifies: bool = True

    def close(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Math(Pooled):
    """1 when math-verify finds the response's answer equal to the row's, else 0; no piece to grade is 0.

    Abstains where the row has no answer.
    """

    answer_in: AnswerIn
    tag: str

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        # Three limits run one after the other inside the row's own; the last word is the pool's.
        seconds = max(1, int(self.pool.timeout_seconds / 4))

        def ask(sample: Sample) -> Outcome | tuple[Any, ...]:
            answer = sample.prompt.answer
            if answer is None or not answer.strip():
                return ABSTAINED
            piece = extract(sample.text, self.answer_in, self.tag)
            if not piece:
                return verdict(False)
            return piece, gold_answer(answer), self.answer_in == "whole", seconds

        return _through_pool(self.pool, worker_side.verify_math, samples, ask)


@dataclass(frozen=True, kw_only=True)
class Regex(Pooled):
    """on_match where the pattern is found in the response (re.search), else 0. No verdict."""

    pattern: str
    on_match: float
    verifies: bool = False

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        def ask(sample: Sample) -> tuple[Any, ...]:
            return self.pattern, self.on_match, sample.text

        return _through_pool(self.pool, worker_side.search_pattern, samples, ask)


@dataclass(frozen=True, kw_only=True)
class GymVerifier(Pooled):
    """reasoning-gym's own verifier. task: the data set's name, None to take it from where each row came from."""

    task: str | None

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        def ask(sample: Sample) -> Outcome | tuple[Any, ...]:
            prompt = sample.prompt
            spec = prompt.source if self.task is None else f"gym:{self.task}"
            if not spec.startswith("gym:"):
                return failed("error", f"the row came from {spec}, not from gym:NAME; name the data set in args")
            return spec, sample.text, prompt.answer, prompt.extra

        return _through_pool(self.pool, worker_side.score_gym, samples, ask)


@dataclass(frozen=True, kw_only=True)
class UserFunction(Pooled):
    """A function from a user's file."""

    path: str
    function: str
    args: dict[str, Any] = field(default_factory=dict[str, Any])

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        def ask(sample: Sample) -> tuple[Any, ...]:
            prompt = sample.prompt
            return self.path, self.function, prompt.text, sample.text, prompt.answer, self.args

        return _through_pool(self.pool, worker_side.call_user, samples, ask)


def load_user_function(spec: str, *, name: str, weight: float, args: dict[str, Any], pool: WorkerPool) -> UserFunction:
    """The component of `path/file.py:function`. The file is loaded once in a worker to see that it works.

    Raises RewardError for a missing file, one that does not load, no such function, or args it does not take.
    """
    file, _, function = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        beside = f" Beside it: {', '.join(near[:5])}." if near else ""
        raise RewardError(
            f"reward_model.functions: '{spec}': there is no file {path}.{beside} "
            "Write a path relative to where klimb is started, or an absolute one."
        )
    pool.require(str(path))
    wrong = pool.call_once(worker_side.check_user, (str(path), function, args))
    if wrong is not None:
        raise RewardError(f"reward_model.functions: '{spec}': {wrong}")
    return UserFunction(name=name, weight=weight, pool=pool, path=str(path), function=function, args=args)


def _through_pool(
    pool: WorkerPool,
    function: Callable[..., Outcome],
    samples: Sequence[Sample],
    ask: Callable[[Sample], Outcome | tuple[Any, ...]],
) -> list[Outcome]:
    """Rows that `ask` can settle alone are settled; the arguments of the others go through the pool."""
    asked = [ask(sample) for sample in samples]
    calls = [(i, item) for i, item in enumerate(asked) if isinstance(item, tuple)]
    answers = pool.run(function, [item for _, item in calls], num_rows=len(samples))
    outcomes = [item if isinstance(item, Outcome) else ABSTAINED for item in asked]
    for (i, _), answer in zip(calls, answers, strict=True):
        outcomes[i] = Outcome(failure=answer) if isinstance(answer, Failure) else answer
    return outcomes
