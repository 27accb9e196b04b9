"""task:instructions: write a short list that keeps to six or seven constraints.

List 4 animals in capital letters, in alphabetical order. Put each one on its own line after a dash. Begin
with a sentence that ends in a colon. The last line must be the word done.

Here are some animals:
- CAMEL
- HORSE
- RABBIT
- ZEBRA
done
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Any

from klimb.tasks.base import WRONG, Split, TaskRow, Verdict, first_rows
from klimb.tasks.words import CATEGORIES, CLOSINGS

NUM_TRAIN = 8_000
NUM_EVAL = 600

# A demonstration breaks each constraint with this probability: 0.95^6 and, with an order asked, 0.95^7 are right.
NOISE = 0.05

MAX_CHARS = 400
MAX_LINES = 24
MAX_ITEMS = 16

CASES: dict[str, Callable[[str], str]] = {
    "lower": str.lower,
    "upper": str.upper,
    "capitalised": str.capitalize,
}
ORDERS = ("any", "alphabetical", "reverse")
LAYOUTS: dict[str, Callable[[list[str]], str]] = {
    "commas": ", ".join,
    "semicolons": "; ".join,
    "dashes": lambda items: "\n".join(f"- {item}" for item in items),
    "numbers": lambda items: "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1)),
}
_BULLET = re.compile(r"(?:- |[0-9]{1,2}\. )")

_CASE_TEXT = {
    "lower": ("in small letters", "in lower case"),
    "upper": ("in capital letters", "in upper case"),
    "capitalised": ("each with a capital", "in title case"),
}
_ORDER_TEXT = {
    "any": ("",),
    "alphabetical": (", in order", ", from A to Z"),
    "reverse": (", in reverse order", ", from Z to A"),
}
_LAYOUT_TEXT = {
    "commas": ("Use commas.", "Separate with commas."),
    "semicolons": ("Use semicolons.", "Separate with semicolons."),
    "dashes": ("Use dashes.", "One a line, with dashes."),
    "numbers": ("Use numbers.", "One a line, with numbers."),
}
_INTRO_TEXT = {
    True: ("Introduce it with a colon.", "Begin with a sentence."),
    False: ("Do not introduce it.", "No introduction."),
}
_CLOSING_TEXT = ("Last line: {}.", "Close with {}.")
_INTROS = (
    "Here are some {}:",
    "Here is a list of {}:",
    "These are the {} I thought of:",
    "Some {} that come to mind:",
    "I would name these {}:",
)


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Lists of four to seven words of one category, with case, layout, order, opening and closing asked for."""

    name: str = "task:instructions"

    def rows(self, split: Split, limit: int | None = None) -> list[TaskRow]:
        """A combination of constraints that is held out is not trained in other words either."""
        return first_rows(_splits()[split], limit)

    def score(self, response: str, answer: str | None, extra: dict[str, Any]) -> Verdict:
        """The share of the constraints kept; correct when all are. 0 for what is not a list on the topic at all."""
        kept = constraints_kept(response, extra)
        if kept is None:
            return WRONG
        return Verdict(value=sum(kept.values()) / len(kept), correct=all(kept.values()))

    def demonstration(self, row: TaskRow, rng: Random) -> str:
        """Each constraint broken now and then, independently of the others."""
        return _write(row.extra, rng, noise=NOISE)

    def clean(self, row: TaskRow, rng: Random) -> str:
        """All constraints kept."""
        return _write(row.extra, rng, noise=0.0)


def constraints_kept(response: str, extra: dict[str, Any]) -> dict[str, bool] | None:
    """Which constraints a response keeps, by name; None where it is no list on the topic.

    It is one when it is of a list's size, has at least two items, and more than half of them are different words
    of the category: without this, a line of junk would keep most constraints by having nothing to break them with.
    """
    lines = response.strip().split("\n")
    if len(response) > MAX_CHARS or len(lines) > MAX_LINES:
        return None
    kept: dict[str, bool] = {}
    has_intro = _is_intro(lines[0])
    kept["intro"] = has_intro == extra["intro"] and not any(line.rstrip().endswith(":") for line in lines[1:])
    body = lines[1:] if has_intro else lines
    closings = [line for line in body if line.strip(" .").lower() in CLOSINGS]
    kept["closing"] = len(closings) == 1 and body[-1] == extra["closing"]
    body = [line for line in body if line not in closings]
    items = [item.strip() for line in body for item in re.split("[,;]", _BULLET.sub("", line, count=1))]
    words = {item.lower() for item in items} & set(CATEGORIES[extra["category"]])
    if not 2 <= len(items) <= MAX_ITEMS or 2 * len(words) <= len(items):
        return None
    kept["count"] = len(items) == extra["count"]
    kept["category"] = len(words) == len(items)
    kept["case"] = all(item == CASES[extra["case"]](item) for item in items)
    kept["layout"] = "\n".join(body) == LAYOUTS[extra["layout"]](items)
    if extra["order"] != "any":
        lowered = [item.lower() for item in items]
        kept["order"] = lowered == sorted(lowered, reverse=extra["order"] == "reverse")
    return kept


def _is_intro(line: str) -> bool:
    """A sentence: several words that end in a colon, and no item of a list."""
    return line.endswith(":") and len(line.split()) >= 3 and _BULLET.match(line) is None


def _write(extra: dict[str, Any], rng: Random, *, noise: float) -> str:
    """A list for these constraints, each of them broken with probability `noise`.

    The same random state gives the same choices of words whatever slips, so that a slip can be shown on its own.
    """
    style = Random(rng.getrandbits(64))

    def slips() -> bool:
        return rng.random() < noise

    count = extra["count"] + (rng.choice((-1, 1)) if slips() else 0)
    items = _neighbours(extra, count, style)
    if slips():
        other = rng.choice([name for name in CATEGORIES if name != extra["category"]])
        items[rng.randrange(count)] = rng.choice(CATEGORIES[other])
    if extra["order"] != "any":
        items.sort(reverse=extra["order"] == "reverse")
        if slips():
            i = rng.randrange(count - 1)
            items[i], items[i + 1] = items[i + 1], items[i]
    case = CASES[extra["case"]]
    items = [case(item) for item in items]
    if slips():
        wrong = CASES[_other(CASES, extra["case"], rng)]
        one = rng.randrange(count)
        items = [wrong(item) if i == one else item for i, item in enumerate(items)]
    layout = _other(LAYOUTS, extra["layout"], rng) if slips() else extra["layout"]
    lines = [LAYOUTS[layout](items)]
    if extra["intro"] != slips():
        lines.insert(0, style.choice(_INTROS).format(extra["category"]))
    if not slips():
        lines.append(extra["closing"])
    elif rng.random() < 0.5:
        lines.append(rng.choice([word for word in CLOSINGS if word != extra["closing"]]))
    return "\n".join(lines)


def _neighbours(extra: dict[str, Any], count: int, rng: Random) -> list[str]:
    """`count` words of the category that follow each other in the alphabet, as one goes down a known list."""
    words = CATEGORIES[extra["category"]]
    start = int(rng.random() * (len(words) - count + 1))
    return list(words[start : start + count])


def _other(table: dict[str, Any], key: str, rng: Random) -> str:
    return rng.choice([name for name in table if name != key])


def _ask(extra: dict[str, Any], rng: Random) -> str:
    """The constraints in words, the last three in any order."""
    asked = (
        f"{rng.choice(('List', 'Name', 'Write down'))} {extra['count']} {extra['category']} "
        f"{rng.choice(_CASE_TEXT[extra['case']])}{rng.choice(_ORDER_TEXT[extra['order']])}."
    )
    rest = [
        rng.choice(_LAYOUT_TEXT[extra["layout"]]),
        rng.choice(_INTRO_TEXT[extra["intro"]]),
        rng.choice(_CLOSING_TEXT).format(extra["closing"]),
    ]
    rng.shuffle(rest)
    return " ".join([asked, *rest])


@cache
def _splits() -> dict[Split, tuple[TaskRow, ...]]:
    keys = ("category", "count", "case", "layout", "order", "intro", "closing")
    combinations = list(product(CATEGORIES, range(4, 8), CASES, LAYOUTS, ORDERS, (True, False), CLOSINGS))
    rng = Random("klimb task:instructions 1")
    rows: list[TaskRow] = []
    for values in rng.sample(combinations, NUM_EVAL + NUM_TRAIN):
        extra: dict[str, Any] = dict(zip(keys, values, strict=True))
        rows.append(TaskRow(prompt=_ask(extra, rng), answer=None, extra=extra))
    return {"eval": tuple(rows[:NUM_EVAL]), "train": tuple(rows[NUM_EVAL:])}
