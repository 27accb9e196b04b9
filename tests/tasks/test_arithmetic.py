import time
from random import Random

import pytest

from klimb.tasks import load_task
from klimb.tasks.arithmetic import NUM_EVAL, NUM_TRAIN

TASK = load_task("task:arithmetic")
EXTRA = {"a": 347, "b": 285}
GOOD = "ones: 7+5=12 carry 1\ntens: 4+8+1=13 carry 1\nhundreds: 3+2+1=6 carry 0\nanswer: 632"


def score(text):
    verdict = TASK.score(text, "632", EXTRA)
    return round(verdict.value, 6), verdict.correct


def test_right_response():
    assert score(GOOD) == (1.0, True)
    assert score(GOOD + "\n") == (1.0, True)


def test_carry_out_of_the_hundreds():
    text = "ones: 9+9=18 carry 1\ntens: 9+9+1=19 carry 1\nhundreds: 9+9+1=19 carry 1\nanswer: 1998"
    assert TASK.score(text, "1998", {"a": 999, "b": 999}).value == 1.0


def test_an_error_carried_through_pays_for_the_columns_that_stay_right():
    text = "ones: 7+5=10 carry 1\ntens: 4+8+1=13 carry 1\nhundreds: 3+2+1=6 carry 0\nanswer: 630"
    assert score(text) == (0.4, False)  # format 0.1 and two columns


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0.0, False)),
        ("answer: 632", (0.45, True)),  # right, with nothing shown
        ("answer:632", (0.0, False)),
        (GOOD.replace("answer: ", ""), (0.45, False)),  # columns, no answer line
        (GOOD.replace("answer", "so"), (0.45, False)),
        (GOOD + "\nok", (0.45, False)),  # the answer is not at the end
        (GOOD + "\nanswer: 632", (0.0, False)),
        ("answer: 632\n" + GOOD, (0.0, False)),
        (GOOD + "\n Answer: 1", (0.0, False)),
        (GOOD + " answer: 632", (0.45, False)),
        (GOOD + " 633 634 635", (0.45, False)),
        (GOOD.replace("632", "0632"), (0.55, False)),
        (GOOD.replace("632", "\u0666\u0663\u0662"), (0.45, False)),  # digits of another script
        ("\n".join(GOOD.split("\n")[:1] * 3 + ["answer: 632"]), (0.6, True)),  # one column pays once
        ("\n".join([*GOOD.split("\n")[2::-1], "answer: 632"]), (0.6, True)),  # only tens is in its place
        ("\n".join(GOOD.split("\n")[:2]), (0.3, False)),  # cut off
        (GOOD + "\n" * 3 + "x", (0.45, False)),
        ("ones: 7+5=12 carry 1\n" * 100 + "answer: 632", (0.0, False)),
        ("\x00" * 100, (0.0, False)),
    ],
)
def test_hostile_and_partial_responses(text, expected):
    assert score(text) == expected


def test_time_is_linear_in_the_text():
    start = time.perf_counter()
    for text in ("ones: " + "7+" * 2_000_000, "answer: " + "1" * 4_000_000, "\n" * 4_000_000):
        assert TASK.score(text, "632", EXTRA).value == 0.0
    assert time.perf_counter() - start < 1.0


def test_splits_hold_out_sums_in_either_order():
    train, held_out = TASK.rows("train", None), TASK.rows("eval", None)
    assert (len(train), len(held_out)) == (NUM_TRAIN, NUM_EVAL)
    pairs = [{frozenset((r.extra["a"], r.extra["b"])) for r in rows} for rows in (train, held_out)]
    assert not pairs[0] & pairs[1]
    assert len({r.prompt for r in train + held_out}) == NUM_TRAIN + NUM_EVAL


def test_clean_demonstrations_score_one():
    rng = Random(0)
    for row in TASK.rows("train", 2_000):
        verdict = TASK.score(TASK.clean(row, rng), row.answer, row.extra)
        assert (verdict.value, verdict.correct) == (1.0, True)


def test_noisy_demonstrations_are_right_as_often_as_intended():
    rng = Random(0)
    rows = TASK.rows("train", 4_000)
    texts = [TASK.demonstration(row, rng) for row in rows]
    verdicts = [TASK.score(text, row.answer, row.extra) for text, row in zip(texts, rows, strict=True)]
    tens = [text.split("\n")[1].split("=")[0].count("+") for text in texts]
    assert abs(sum(n == 1 for n in tens) / len(tens) - 0.5) < 0.03  # standard error 0.008
    assert 0.5 < sum(v.correct for v in verdicts) / len(verdicts) < 0.65
    assert 0.55 < sum(v.value for v in verdicts) / len(verdicts) < 0.8


def test_a_forgotten_carry_of_nothing_leaves_the_answer_right_but_not_the_step():
    text = "ones: 1+2=3 carry 0\ntens: 1+2=3 carry 0\nhundreds: 1+2+0=3 carry 0\nanswer: 333"
    verdict = TASK.score(text, "333", {"a": 111, "b": 222})
    assert (round(verdict.value, 6), verdict.correct) == (0.85, True)


def test_a_slip_is_carried_on_consistently():
    rng = Random(3)
    for row in TASK.rows("train", 500):
        lines = TASK.demonstration(row, rng).split("\n")[:3]
        sums = [int(line.split("=")[1].split()[0]) for line in lines]
        carries = [int(line.split()[-1]) for line in lines]
        assert carries == [s // 10 for s in sums]
        for line, carry in zip(lines[1:], carries[:2], strict=True):
            addends = line.split(": ")[1].split("=")[0].split("+")
            assert len(addends) == 2 or addends[2] == str(carry)
