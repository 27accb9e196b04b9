import time
from random import Random

import pytest

from klimb.tasks import load_task
from klimb.tasks.instructions import NOISE, constraints_kept
from klimb.tasks.words import CATEGORIES, CLOSINGS

TASK = load_task("task:instructions")
EXTRA = {
    "category": "animals",
    "count": 4,
    "case": "upper",
    "layout": "dashes",
    "order": "alphabetical",
    "intro": True,
    "closing": "done",
}
GOOD = "Here are some animals:\n- CAMEL\n- MONKEY\n- RABBIT\n- ZEBRA\ndone"


def broken(text, **changes):
    kept = constraints_kept(text, EXTRA | changes)
    assert kept is not None
    return {name for name, ok in kept.items() if not ok}


def test_right_response():
    verdict = TASK.score(GOOD, None, EXTRA)
    assert (verdict.value, verdict.correct) == (1.0, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.split("\n", 1)[1], {"intro"}),
        (GOOD.replace("\ndone", ""), {"closing"}),
        (GOOD.replace("\ndone", "\nend"), {"closing"}),
        (GOOD + "\ndone", {"closing"}),
        (GOOD.replace("MONKEY", "monkey"), {"case"}),
        (GOOD.replace("MONKEY", "MANGO"), {"category"}),
        (GOOD.replace("MONKEY", "CAMEL"), {"category"}),  # the same word twice
        (GOOD.replace("- MONKEY\n", ""), {"count"}),
        (GOOD.replace("- MONKEY", "* MONKEY"), {"layout", "category", "order"}),
        (GOOD.replace("\n- MONKEY", ", MONKEY"), {"layout"}),
        (GOOD.replace("CAMEL", "X").replace("ZEBRA", "CAMEL").replace("X", "ZEBRA"), {"order"}),
        (GOOD.replace("\n- RABBIT", "\n- RABBIT:"), {"intro", "category"}),
        (GOOD + " done", {"closing", "category", "count", "case", "layout", "order"}),
    ],
)
def test_each_constraint_is_seen_on_its_own(text, expected):
    assert broken(text) == expected
    assert TASK.score(text, None, EXTRA).correct is False
    assert TASK.score(text, None, EXTRA).value == pytest.approx(1 - len(expected) / 7)


def test_other_layouts_and_orders():
    assert not broken("Lemon; Apple\nend", category="fruits", count=2, case="capitalised", layout="semicolons",
                      order="reverse", intro=False, closing="end")  # fmt: skip
    assert not broken("1. axe\n2. drill\nover", category="tools", count=2, case="lower", layout="numbers",
                      order="any", intro=False, closing="over")  # fmt: skip
    assert broken("1. axe\n3. drill\nover", category="tools", count=2, case="lower", layout="numbers",
                  order="any", intro=False, closing="over") == {"layout"}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "done",
        "Here are some animals:\ndone",
        "Here are some animals:\n- CAMEL\ndone",
        "Here are some animals:\n- A\n- B\n- C\n- D\ndone",  # junk that breaks no other constraint
        "Here are some animals:\n- CAMEL\n- CAMEL\n- CAMEL\n- CAMEL\ndone",
        "Here are some animals:\n" + "- ZEBRA\n" * 200 + "done",
        GOOD * 20,
        "-,;" * 100,
        "\x00\u2028:\n" * 20,
    ],
)
def test_what_is_no_list_on_the_topic_scores_nothing(text):
    verdict = TASK.score(text, None, EXTRA)
    assert (verdict.value, verdict.correct) == (0.0, False)


def test_time_is_linear_in_the_text():
    start = time.perf_counter()
    for text in (", " * 2_000_000, "\n" * 4_000_000, "1. " * 1_000_000):
        assert TASK.score(text, None, EXTRA).value == 0.0
    assert time.perf_counter() - start < 1.0


def test_words_are_told_apart():
    words = [word for category in CATEGORIES.values() for word in category]
    assert len(words) == len(set(words)) == 36
    assert not set(words) & set(CLOSINGS)
    assert all(list(c) == sorted(c) and all(w.isascii() and w.islower() for w in c) for c in CATEGORIES.values())


def test_splits_hold_out_combinations():
    train, held_out = ({tuple(r.extra.values()) for r in TASK.rows(s, None)} for s in ("train", "eval"))
    assert (len(train), len(held_out)) == (8_000, 600)
    assert not train & held_out


def test_clean_demonstrations_score_one():
    rng = Random(0)
    for row in TASK.rows("train", 2_000):
        verdict = TASK.score(TASK.clean(row, rng), row.answer, row.extra)
        assert (verdict.value, verdict.correct) == (1.0, True)


def test_noisy_demonstrations_are_right_as_often_as_intended():
    rng = Random(0)
    rows = TASK.rows("train", 4_000)
    verdicts = [TASK.score(TASK.demonstration(row, rng), row.answer, row.extra) for row in rows]
    kept = 1 - NOISE
    share = sum(v.correct for v in verdicts) / len(verdicts)
    assert abs(share - (kept**6 / 3 + kept**7 * 2 / 3)) < 0.03  # standard error 0.008
    assert 0.85 < sum(v.value for v in verdicts) / len(verdicts) < 0.98
