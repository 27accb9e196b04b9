import pytest

from klimb.tasks import load_task
from klimb.tasks.gym import extract_answer


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" 42 \n", "42"),
        ("so <answer> 42 </answer>.", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> and <answer>2", "1"),  # an open tag is not an answer
        ("<answer><answer>7</answer>", "7"),
        ("</answer>5", "</answer>5"),
        ("", ""),
    ],
)
def test_extract_answer(response, expected):
    assert extract_answer(response) == expected


def test_leg_counting_verifier():
    task = load_task("gym:leg_counting")
    for split in ("train", "eval"):
        for row in task.rows(split, 20):
            assert row.answer is not None
            right = task.score(f"let me count <answer>{row.answer}</answer>", row.answer, row.extra)
            assert (right.value, right.correct) == (1.0, True)
            wrong = task.score(f"<answer>{int(row.answer) + 1}</answer>", row.answer, row.extra)
            assert wrong.value < 1.0
            assert not wrong.correct


@pytest.mark.parametrize("name", ["countdown", "word_sorting", "polynomial_equations", "mini_sudoku", "knights_knaves"])
def test_verifiers_take_their_own_answers_and_any_junk(name):
    task = load_task(f"gym:{name}")
    for row in task.rows("train", 3):
        assert task.score(f"<answer>{row.answer}</answer>", row.answer, row.extra).correct or name == "countdown"
        for junk in ("", "<answer></answer>", "\x00\ud800", "[" * 3_000, "9" * 100_000, "{'a': ", "import os"):
            assert not task.score(junk, row.answer, row.extra).correct
