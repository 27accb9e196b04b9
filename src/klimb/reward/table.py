"""Which name in reward_model.functions makes which component."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from klimb.errors import ConfigError
from klimb.reward.answers import AnswerIn
from klimb.reward.base import RewardComponent
from klimb.reward.functions import GymVerifier, Math, Regex, load_user_function
from klimb.reward.http import HttpReward
from klimb.reward.rules import ExactAnswer, Length, TaskVerifier
from klimb.reward.worker_side import check_gym
from klimb.reward.workers import WorkerPool
from klimb.tasks.table import load_task


@dataclass(frozen=True, kw_only=True)
class FunctionSpec:
    """One entry of reward_model.functions."""

    name: str
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict[str, Any])


class _Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AnswerArgs(_Args):
    """answer_in: where the answer stands (answers.extract). tag: for answer_in: tag, without the brackets."""

    answer_in: AnswerIn
    tag: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] = "answer"


class RegexArgs(_Args):
    """pattern: Python's re, found anywhere; inline flags such as (?i) work. on_match: the value when found."""

    pattern: str
    on_match: float = 1.0

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None
        return self


class LengthArgs(_Args):
    """See rules.Length. Exactly one of target and max."""

    target: Annotated[int, Field(gt=0)] | None = None
    max: Annotated[int, Field(gt=0)] | None = None
    unit: Literal["tokens", "chars"] = "tokens"

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.target is None) == (self.max is None):
            raise ValueError("give exactly one of target and max")
        return self


class NameArgs(_Args):
    """name: the task or data set; None takes it from where each row came from."""

    name: str | None = None


class TaskArgs(NameArgs):
    """graded: see rules.TaskVerifier."""

    graded: bool = True


class HttpArgs(_Args):
    """batch_size: rows per call."""

    batch_size: Annotated[int, Field(gt=0)] = 64


A = TypeVar("A", bound=_Args)


def _exact_answer(label: str, spec: FunctionSpec, pool: WorkerPool) -> RewardComponent:
    args = _read_args(AnswerArgs, spec)
    return ExactAnswer(name=label, weight=spec.weight, answer_in=args.answer_in, tag=args.tag)


def _math(label: str, spec: FunctionSpec, pool: WorkerPool) -> RewardComponent:
    args = _read_args(AnswerArgs, spec)
    pool.require("math_verify")
    return Math(name=label, weight=spec.weight, pool=pool, answer_in=args.answer_in, tag=args.tag)


def _regex(label: str, spec: FunctionSpec, pool: WorkerPool) -> RewardComponent:
    args = _read_args(RegexArgs, spec)
    return Regex(name=label, weight=spec.weight, pool=pool, pattern=args.pattern, on_match=args.on_match)


def _length(label: str, spec: FunctionSpec, pool: WorkerPool) -> RewardComponent:
    args = _read_args(LengthArgs, spec)
    return Length(name=label, weight=spec.weight, target=args.target, max=args.max, unit=args.unit)


def _task(label: str, spec: FunctionSpec, pool: WorkerPool) -> RewardComponent:
    args = _read_args(TaskArgs, spec)
    if args.name is not None:
        load_task(f"task:{args.name}")
    return TaskVerifier(name=label, weight=spec.weight, task=args.name, graded=args.graded)


def _gym(label: str, spec: FunctionSpec, pool: WorkerPool) -> RewardComponent:
    args = _read_args(NameArgs, spec)
    pool.require("reasoning_gym")
    if args.name is not None:
        pool.call_once(check_gym, (f"gym:{args.name}",))
    return GymVerifier(name=label, weight=spec.weight, pool=pool, task=args.name)


FUNCTIONS: dict[str, Callable[[str, FunctionSpec, WorkerPool], RewardComponent]] = {
    "exact_answer": _exact_answer,
    "math": _math,
    "regex": _regex,
    "length": _length,
    "task": _task,
    "gym": _gym,
}


def make_components(specs: Sequence[FunctionSpec], pool: WorkerPool) -> tuple[RewardComponent, ...]:
    """The components of a config's list, each with a name of its own; a second `regex` is called `regex#2`.

    pool gives time limits and processes, and stays the caller's to close.
    Raises ConfigError for an unknown name, bad args or a weight that is no finite number; RewardError for a
    user's file that does not work.
    """
    made: list[RewardComponent] = []
    labels: list[str] = []
    for spec in specs:
        label = _label(spec.name)
        labels.append(label)
        times = labels.count(label)
        made.append(make_component(spec, pool, label=label if times == 1 else f"{label}#{times}"))
    return tuple(made)


def make_component(spec: FunctionSpec, pool: WorkerPool, *, label: str | None = None) -> RewardComponent:
    """One component; see `make_components`. label: its name in metrics, by default taken from spec.name."""
    label = _label(spec.name) if label is None else label
    if not math.isfinite(spec.weight):
        raise ConfigError(f"reward_model.functions: '{spec.name}': weight is {spec.weight}; give a finite number.")
    if spec.name.startswith(("http://", "https://")):
        return _http(label, spec, pool)
    if _is_file(spec.name):
        return load_user_function(spec.name, name=label, weight=spec.weight, args=spec.args, pool=pool)
    if spec.name in FUNCTIONS:
        return FUNCTIONS[spec.name](label, spec, pool)
    near = get_close_matches(spec.name, FUNCTIONS, n=1)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    raise ConfigError(
        f"reward_model.functions: there is no reward '{spec.name}'. {hint}"
        f"Allowed are {', '.join(FUNCTIONS)}, a function of yours as path/file.py:function, and an endpoint as http://..."
    )


def _http(label: str, spec: FunctionSpec, pool: WorkerPool) -> RewardComponent:
    args = _read_args(HttpArgs, spec)
    return HttpReward(
        spec.name,
        name=label,
        weight=spec.weight,
        batch_size=args.batch_size,
        timeout_seconds=pool.timeout_seconds,
    )


def _is_file(name: str) -> bool:
    return name.rpartition(":")[0].endswith(".py")


def _label(name: str) -> str:
    """A short name for metrics: regex, file.function, http.host:port. None of them can be reward/mean's mean."""
    if name.startswith(("http://", "https://")):
        try:
            host = httpx.URL(name).netloc.decode("ascii")
        except httpx.InvalidURL as error:
            raise ConfigError(f"reward_model.functions: '{name}' is no address: {error}.") from None
        if not host:
            raise ConfigError(f"reward_model.functions: '{name}' names no host; write it as http://host:port/path.")
        return f"http.{host}"
    if _is_file(name):
        file, _, function = name.rpartition(":")
        return f"{Path(file).stem}.{function}"
    return name


def _read_args(model: type[A], spec: FunctionSpec) -> A:
    try:
        return model.model_validate(spec.args)
    except ValidationError as error:
        problems = "; ".join(_problem(model, item) for item in error.errors())
    raise ConfigError(f"reward_model.functions: '{spec.name}': {problems}. Args: {_allowed(model)}.")


def _problem(model: type[_Args], item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        near = get_close_matches(key, model.model_fields, n=1)
        return f"unknown arg '{key}'" + (f", did you mean '{near[0]}'?" if near else "")
    if item["type"] == "missing":
        return f"the arg '{key}' is missing"
    found = "" if item["type"] == "value_error" else f", found {item['input']!r:.80}"
    return f"{f'args.{key}: ' if key else ''}{item['msg'].removeprefix('Value error, ')}{found}"


def _allowed(model: type[_Args]) -> str:
    shown: list[str] = []
    for name, info in model.model_fields.items():
        choices = getattr(info.annotation, "__args__", ()) if name in ("answer_in", "unit") else ()
        kind = " | ".join(map(str, choices))
        default = "required" if info.is_required() else f"default {info.default}"
        shown.append(f"{name} ({f'{kind}, ' if kind else ''}{default})")
    return ", ".join(shown)
