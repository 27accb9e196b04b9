"""What runs inside the worker processes: a user's function, math-verify, regular expressions, gym verifiers.

This module is imported by every worker and stays light: no torch. Nothing leaves a worker but plain values, so
that an exception or an object of a user's own class never has to be unpickled in the training process.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from klimb.reward.answers import same_answer
from klimb.reward.base import Failure, Outcome, outcome_of, valued, verdict


def start(parent: int, needed: tuple[str, ...]) -> None:
    """Load what the calls will need, so that loading does not count against a row's time limit.

    parent: pid of the training process. needed: module names and paths of .py files. A thing that cannot be
    loaded is silent here: the call that needs it says so.
    """
    if sys.platform == "linux":
        _die_with(parent)
    for item in needed:
        try:
            _load(item) if item.endswith(".py") else importlib.import_module(item)
        except BaseException:
            continue
    # A model's text that math-verify cannot read is an everyday thing, not a line on the terminal.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def _die_with(parent: int) -> None:
    # A worker busy in a loop does not see its pipe close; without this it would outlive a killed run.
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def guarded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call and turn whatever it raises, SystemExit included, into a Failure of kind error."""
    try:
        return function(*arguments)
    except BaseException as error:
        return Failure(kind="error", detail=describe(error))


def describe(error: BaseException) -> str:
    """The exception's class and message, at most 300 characters."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}"[:300]


def call_user(path: str, name: str, prompt: str, response: str, answer: str | None, args: dict[str, Any]) -> Outcome:
    """One row through a user's function."""
    function = getattr(_load(path), name)
    return outcome_of(function(prompt=prompt, response=response, answer=answer, **args))


def check_user(path: str, name: str, args: dict[str, Any]) -> str | None:
    """None when the function can be called, else what is wrong, in words for the user."""
    try:
        module = _load(path)
    except SyntaxError as error:
        return f"line {error.lineno} is not Python: {error.msg}"
    except BaseException as error:
        return f"loading the file raised {describe(error)}"
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = get_close_matches(name, names, n=1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        return f"it has no function '{name}'. {hint}It has: {', '.join(names) or 'none'}."
    if inspect.iscoroutinefunction(found):
        return f"'{name}' is async; write a plain function, klimb runs it in worker processes."
    try:
        inspect.signature(found).bind(prompt="", response="", answer=None, **args)
    except (TypeError, ValueError) as error:
        return (
            f"'{name}{inspect.signature(found)}' cannot be called with prompt, response, answer"
            f"{''.join(f', {key}' for key in args)}: {error}. "
            "Write it as def reward(prompt, response, answer, **args); args are the config's args."
        )
    return None


@lru_cache
def _load(path: str) -> ModuleType:
    name = f"klimb_reward_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name, and a script may import the files beside it.
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
    return module


def search_pattern(pattern: str, on_match: float, text: str) -> Outcome:
    """on_match when the pattern is found anywhere in the text, else 0."""
    return valued(on_match if re.search(pattern, text) else 0.0)


def verify_math(piece: str, gold: str, whole: bool, seconds: int) -> Outcome:
    """Right when the two agree as answers, or as formulas by math-verify.

    whole: the piece is free text in which math-verify looks for the formula itself. seconds: each parse's and
    the comparison's own limit; a piece that takes longer is wrong.
    """
    math_verify: Any = importlib.import_module("math_verify")
    if same_answer(piece, gold):
        return verdict(True)
    reference = math_verify.parse(_as_formula(gold), parsing_timeout=seconds)
    given = math_verify.parse(piece if whole else _as_formula(piece), parsing_timeout=seconds)
    return verdict(bool(math_verify.verify(reference, given, timeout_seconds=seconds)))


def _as_formula(piece: str) -> str:
    # Without dollars math-verify takes only bare numbers and fractions out of a text.
    return f"${piece.strip().strip('$')}$"


def score_gym(spec: str, response: str, answer: str | None, extra: dict[str, Any]) -> Outcome:
    """A task's own verifier. spec: gym:NAME."""
    from klimb.tasks.table import load_task

    judged = load_task(spec).score(response, answer, extra)
    return valued(judged.value, judged.correct)


def check_gym(spec: str) -> bool:
    """Raises when the spec names no data set, or when reasoning-gym is not installed."""
    from klimb.tasks.table import load_task

    return load_task(spec).name == spec
