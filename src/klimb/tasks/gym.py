"""gym:NAME: a reasoning-gym data set as a task. The package is an extra and is imported when a task is used.

reasoning-gym makes row i of a data set from seed + i, so two seeds close to each other give mostly the same
rows; the splits are therefore taken far apart, and held-out questions that training has too are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from typing import Any

from klimb.errors import DataError, MissingExtra
from klimb.tasks.base import WRONG, Split, TaskRow, Verdict, first_rows

NUM_ROWS: dict[Split, int] = {"train": 2_000, "eval": 256}
SEEDS: dict[Split, int] = {"train": 0, "eval": 1_000_000}

ASK = "\n\nGive your final answer between <answer> and </answer>."
OPENING = "<answer>"
CLOSING = "</answer>"
# reasoning-gym's verifiers parse and some of them search: a text no answer is long enough for is not given to them.
MAX_ANSWER_CHARS = 4_000


@dataclass(frozen=True, kw_only=True)
class Gym:
    """One reasoning-gym data set with its default settings."""

    dataset: str

    @property
    def name(self) -> str:
        return f"gym:{self.dataset}"

    def rows(self, split: Split, limit: int | None = None) -> list[TaskRow]:
        """Rows hold their split and index, from which `score` finds the data set's own entry again.

        Raises DataError when the data set has so few questions that none is left to hold out.
        """
        if split == "train":
            # Some data sets take tens of milliseconds a row, so only the rows asked for are made.
            return [_row(self.dataset, split, index) for index in first_rows(range(NUM_ROWS[split]), limit)]
        rows = first_rows(_held_out(self.dataset), limit)
        if not rows:
            raise DataError(
                f"{self.name}: every held-out question is also among the {NUM_ROWS['train']} training questions, "
                "so nothing can be held out. Choose another data set, or other eval_files."
            )
        return rows

    def score(self, response: str, answer: str | None, extra: dict[str, Any]) -> Verdict:
        """reasoning-gym's own verifier on the last <answer> ... </answer>, or on the whole text without one."""
        given = extract_answer(response)
        if len(given) > MAX_ANSWER_CHARS:
            return WRONG
        entry = _entry(self.dataset, extra["split"], extra["index"])
        try:
            score = float(_dataset(self.dataset, extra["split"]).score_answer(given, entry=entry))
        except Exception:
            # Some verifiers raise on text they cannot parse: such a text is a wrong answer, not a failed reward.
            return WRONG
        if not score > 0.0:
            return WRONG
        value = min(1.0, score)
        return Verdict(value=value, correct=value >= 1.0 - 1e-9)


def extract_answer(response: str) -> str:
    """What stands in the last closed <answer> tag, else the whole response, stripped."""
    end = response.rfind(CLOSING)
    start = response.rfind(OPENING, 0, end) if end >= 0 else -1
    return response[start + len(OPENING) : end].strip() if start >= 0 else response.strip()


def load_gym(dataset: str) -> Gym:
    """The task of that name. MissingExtra without reasoning-gym, DataError for an unknown name."""
    names = sorted(_factory().DATASETS)
    if dataset not in names:
        near = get_close_matches(dataset, names, n=3)
        hint = f"Nearest: {', '.join(near)}." if near else f"There are {len(names)}, such as {', '.join(names[:5])}."
        raise DataError(
            f"gym:{dataset}: reasoning-gym has no data set '{dataset}'. {hint} "
            "Write one of its names after 'gym:', as in gym:leg_counting."
        )
    return Gym(dataset=dataset)


def _factory() -> Any:
    try:
        return import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "reasoning_gym":
            raise
        raise MissingExtra("reasoning-gym", "gym", "a data source gym:NAME") from error


@lru_cache(maxsize=8)
def _dataset(name: str, split: Split) -> Any:
    return _factory().create_dataset(name, size=NUM_ROWS[split], seed=SEEDS[split])


@lru_cache(maxsize=8_192)
def _entry(name: str, split: Split, index: int) -> Any:
    return _dataset(name, split)[index]


def _row(name: str, split: Split, index: int) -> TaskRow:
    entry = _entry(name, split, index)
    answer = None if entry["answer"] is None else str(entry["answer"])
    return TaskRow(prompt=str(entry["question"]) + ASK, answer=answer, extra={"split": split, "index": index})


@lru_cache(maxsize=8)
def _held_out(name: str) -> tuple[TaskRow, ...]:
    trained = {_row(name, "train", index).prompt for index in range(NUM_ROWS["train"])}
    rows = (_row(name, "eval", index) for index in range(NUM_ROWS["eval"]))
    return tuple(row for row in rows if row.prompt not in trained)
