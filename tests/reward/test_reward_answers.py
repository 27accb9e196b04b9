"""Which piece of a text is graded, and when two answers are the same."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klimb.reward.answers import extract, gold_answer, number, same_answer

BOXES = [
    (r"Answer: \boxed{5}", "5"),
    (r"first \boxed{3}, no: \boxed{5}", "5"),
    (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"twice \boxed{\boxed{5}}", "5"),
    (r"a set \boxed{\{1,2\}}", r"\{1,2\}"),
    (r"done \boxed{5} then \boxed{6", "5"),
    (r"{ left open \boxed {7}", "7"),
    (r"closed too often \boxed{8} }}", "8"),
    ("the number 5 appears but no box", None),
    (r"\boxed{5", None),
    (r"\fbox{5}", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "piece"), BOXES)
def test_case_RF_03_last_balanced_box(text: str, piece: str | None) -> None:
    assert extract(text, "boxed") == piece


def test_case_RF_03_hashes() -> None:
    assert extract("... #### 1,234", "hashes") == "1,234"
    assert extract("#### 3 no: #### 5\nNext question: 7", "hashes") == "5"
    assert extract("no marker 5", "hashes") is None
    assert same_answer("1,234", "1234")


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("x = 3,4", "4"),
        ("5-3", "3"),
        ("it is -7.", "-7"),
        ("1,234,567 in all", "1,234,567"),
        ("about 3/4 of it", "3/4"),
        ("$1,234.50 total", "$1,234.50"),
        ("none", None),
    ],
)
def test_last_number(text: str, piece: str | None) -> None:
    assert extract(text, "last_number") == piece


def test_tag_and_whole() -> None:
    assert extract("<answer>3</answer> no <answer> 5 </answer> <answer>7", "tag") == "5"
    assert extract("<out>3</out>", "tag", "out") == "3"
    assert extract("</answer><answer>3", "tag") is None
    assert extract("  5\n", "whole") == "5"


def test_gold_side() -> None:
    assert gold_answer("12 + 9 = 21\n#### 21") == "21"
    assert gold_answer(r"so it is \boxed{3}.") == "3"
    assert gold_answer(" Paris ") == "Paris"


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        ("1,234", "1234"),
        ("1234.0", "1,234"),
        ("$18.00", "18"),
        (r"\$18", "18."),
        ("18 dollars", "18"),
        ("12 eggs per day", "12"),
        ("7 km", "7km"),
        ("50%", "50"),
        (r"45^\circ", "45"),
        (r"5\text{ cm}", "5"),
        ("-$5", "-5"),
        ("\u22123", "-3"),
        ("0.5", "1/2"),
        (r"\dfrac{1}{2}", "0.5"),
        ("+7", "7"),
        (".5", "0.50"),
        ("PARIS ", "Paris"),
    ],
)
def test_same(given: str, gold: str) -> None:
    assert same_answer(given, gold)
    assert same_answer(gold, given)


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        ("5x", "5"),
        ("5 x", "5"),
        ("5 million", "5"),
        ("5 or 6", "5"),
        ("5 6", "5"),
        ("3 1/2", "3"),
        ("-3", "3"),
        ("1,23", "123"),
        ("1e3", "1000"),
        ("1/0", "0"),
        ("0.1", "0.10000001"),
        ("Paris", "London"),
        ("", "5"),
    ],
)
def test_not_the_same(given: str, gold: str) -> None:
    assert not same_answer(given, gold)
    assert not same_answer(gold, given)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{:,}", "{}", "{:,}.", "{:,}.00", "{} apples", "${:,}"]))
def test_written_integers_are_read_back(value: int, form: str) -> None:
    assert number(form.format(value)) == Fraction(value)


@given(st.text(alphabet="\\boxed{}#0123,./-$ <answer>e", max_size=60))
def test_any_text_is_safe(text: str) -> None:
    for where in ("boxed", "hashes", "last_number", "tag", "whole"):
        piece = extract(text, where)
        assert piece is None or piece in text
        same_answer(piece or "", text)


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 20_000,
        "\\boxed" + " " * 100_000,
        "1," * 50_000,
        "1,234" * 20_000,
        "<answer>" * 20_000 + "</answer>",
    ],
    ids=["boxes", "spaces", "commas", "groups", "tags"],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    start = time.perf_counter()
    for where in ("boxed", "hashes", "last_number", "tag"):
        same_answer(extract(text, where) or "", "5")
    number("9" * 400 + " " + "a " * 100_000)
    # Linear takes some 0.1 s here; quadratic would take minutes.
    assert time.perf_counter() - start < 5.0
