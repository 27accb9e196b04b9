"""Find the answer in a text and compare it with the reference. Pure text, every step linear in its length.

The text is hostile: it may be megabytes of braces or digits. Nothing here evaluates it, and no pattern can
backtrack over more than it has just matched.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

AnswerIn = Literal["boxed", "hashes", "last_number", "tag", "whole"]

# Two backslashes are a line break in LaTeX and \{ is a brace to be printed: neither opens or closes a group.
_BRACES = re.compile(r"\\boxed[ \t]*\{|\\[\\{}]|[{}]")
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]])-)?[$]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
)
_PLAIN = re.compile(
    r"([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?: ?/ ?([0-9]+(?:\.[0-9]+)?))?(.*)", re.DOTALL
)
_FRACTION = re.compile(r"\\[dt]?frac ?\{([0-9]+)\} ?\{([0-9]+)\}")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf) ?\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ -][^\W\d_]+)*")

# A longer text is compared as text: no answer worth the name has a number of this length.
_LONGEST_NUMBER = 400
_MOST_UNIT_WORDS = 4
_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"
# Written right behind the number; anything else there, as the x of 5x, is part of a formula.
_GLUED_UNITS_TEXT = (
    "% am cent cents cl cm dm eur ft g gb gbp h hr hrs hz in kb kg km km/h kmh kph kw l lb lbs "
    "m m/s mb mg mi min ml mm mph ms nd oz pm rd s sec st th usd yd \u00a2 \u00b0 \u00b0c "
    "\u00b0f"
)
_GLUED_UNITS = frozenset(_GLUED_UNITS_TEXT.split())
# Words behind a number that change which number it is.
_NO_UNITS_TEXT = (
    "and billion by cubed divided dozen factorial half hundred k million minus mod of or over "
    "pi plus quarter root score sqrt squared than third thousand times to trillion"
)
_NO_UNITS = frozenset(_NO_UNITS_TEXT.split())


def extract(text: str, answer_in: AnswerIn, tag: str = "answer") -> str | None:
    r"""The piece that is graded, stripped; None when the text has no such piece.

    boxed: inside the last balanced \boxed{...}. hashes: behind the last ####, to the end of its line.
    last_number: the last number of the text. tag: inside the last closed <tag>...</tag>. whole: everything.
    """
    if answer_in == "boxed":
        piece = _last_box(text)
    elif answer_in == "hashes":
        _, found, after = text.rpartition("####")
        piece = after.strip().partition("\n")[0] if found else None
    elif answer_in == "last_number":
        piece = None
        for match in _NUMBER.finditer(text):
            piece = match.group()
    elif answer_in == "tag":
        end = text.rfind(f"</{tag}>")
        start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
        piece = text[start + len(tag) + 2 : end] if start >= 0 else None
    else:
        piece = text
    return None if piece is None else piece.strip()


def gold_answer(answer: str) -> str:
    """The answer in a reference: a whole solution ends in #### or a box, anything else is the answer itself."""
    found = extract(answer, "hashes")
    if found is None:
        found = extract(answer, "boxed")
    return answer.strip() if found is None else found


def _last_box(text: str) -> str | None:
    open_groups: list[tuple[int, bool]] = []
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{" or token.startswith("\\boxed"):
            open_groups.append((match.end(), token != "{"))
        elif token == "}" and open_groups:
            start, is_box = open_groups.pop()
            if is_box and (best is None or start > best[0]):
                best = (start, match.start())
    return None if best is None else text[best[0] : best[1]]


def same_answer(given: str, gold: str) -> bool:
    """Whether two answers agree: as numbers when both are numbers, else as text without case or outer space."""
    if given.strip().casefold() == gold.strip().casefold():
        return True
    mine = number(given)
    return mine is not None and mine == number(gold)


def number(text: str) -> Fraction | None:
    """The number that a text is, exactly; None when it is anything more than one number.

    Thousands separators, a currency sign, units (also %), a closing period and LaTeX around it do not count.
    Exponents are not read: 1e999999999 would have to be written out.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    match = _PLAIN.fullmatch(_without_decoration(text))
    if match is None:
        return None
    sign, digits, divisor, rest = match.groups()
    if not _is_unit(rest):
        return None
    value = Fraction(digits.replace(",", "").rstrip("."))
    if divisor is not None:
        if not Fraction(divisor):
            return None
        value /= Fraction(divisor)
    return -value if sign == "-" else value


def _without_decoration(text: str) -> str:
    text = text.strip().removeprefix("\\(").removesuffix("\\)")
    for old, new in (
        ("\\$", "$"),
        ("\\%", "%"),
        ("{,}", ","),
        ("\\,", " "),
        ("\\!", ""),
        ("\\ ", " "),
        ("^\\circ", "\u00b0"),
    ):
        text = text.replace(old, new)
    text = text.translate({0x2212: "-", 0x2009: None, 0x202F: None, 0x00A0: " "})
    text = _FRACTION.sub(r"\1/\2", _TEXT.sub(r" \1", text))
    for sign in _CURRENCY:
        text = text.replace(sign, "")
    return " ".join(text.split()).removesuffix(".").strip()


def _is_unit(rest: str) -> bool:
    if not rest:
        return True
    if rest.strip().casefold() in _GLUED_UNITS:
        return True
    if not rest.startswith(" ") or not _WORDS.fullmatch(rest[1:]):
        return False
    words = rest[1:].replace("-", " ").casefold().split()
    # One letter alone is a variable, unless it is a unit (looked up above).
    return len(words) <= _MOST_UNIT_WORDS and min(map(len, words)) > 1 and _NO_UNITS.isdisjoint(words)
