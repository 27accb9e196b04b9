from itertools import pairwise
from random import Random

import pytest

from klimb.playground.corrupt import draw_pair, trick
from klimb.playground.settings import TAUGHT


@pytest.mark.parametrize("task", TAUGHT, ids=lambda task: task.name)
def test_the_better_response_is_better_by_the_verifier(task):
    rng = Random(0)
    rows = task.rows("train", 400)
    clean = 0
    for row, other in pairwise(rows):
        better, worse = (task.score(t, row.answer, row.extra) for t in draw_pair(task, row, other, rng))
        assert better.value > worse.value
        clean += better.correct
    assert clean / (len(rows) - 1) > 0.8


def test_tricks_cover_each_kind():
    rng = Random(0)
    text = "ones: 1\nanswer: 2"
    made = {trick(text, "ones: 7\nanswer: 8", rng) for _ in range(500)}
    assert "" in made
    assert {"ones: 1\nanswer: 2\nanswer: 2", "ones: 1\nanswer: 8", "ones: 7\nanswer: 8", "answer: 2"} <= made
    assert any(len(t) == len(text) and t.startswith("ones: 1\nanswer: ") and t != text for t in made)
