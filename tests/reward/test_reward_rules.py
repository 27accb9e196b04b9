"""The rule rewards: exact_answer, math, regex, length, task and gym verifiers, each through its real parts."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_samples import make_sample

from klimb.errors import RewardError
from klimb.reward.base import ABSTAINED, RewardComponent
from klimb.reward.table import FunctionSpec, make_component
from klimb.reward.workers import WorkerPool
from klimb.tasks.table import load_task

OWN_ROWS = Path(__file__).resolve().parents[1] / "data" / "gsm8k_style.jsonl"
GSM8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k" / "test.jsonl"

RF_03 = [
    (r"Answer: \boxed{5}", "5", 1.0),
    (r"first \boxed{3}, no: \boxed{5}", "5", 1.0),
    (r"first \boxed{3}, no: \boxed{5}", "3", 0.0),
    (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
    ("the number 5 appears but no box", "5", 0.0),
    ("", "5", 0.0),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(workers=2, timeout_seconds=12.0) as pool:
        yield pool


def build(pool: WorkerPool, name: str, /, **args: Any) -> RewardComponent:
    return make_component(FunctionSpec(name=name, args=args), pool)


@pytest.mark.parametrize("name", ["exact_answer", "math"])
def test_case_RF_03_boxed_and_hashes(pool: WorkerPool, name: str) -> None:
    boxed = build(pool, name, answer_in="boxed")
    got = boxed.score([make_sample(text, answer=answer) for text, answer, _ in RF_03])
    assert [outcome.value for outcome in got] == [value for _, _, value in RF_03]
    assert [outcome.correct for outcome in got] == [value == 1.0 for _, _, value in RF_03]
    hashes = build(pool, name, answer_in="hashes")
    assert hashes.score([make_sample("... #### 1,234", answer="1234")])[0].value == 1.0


def test_math_reads_formulas_where_exact_answer_reads_text(pool: WorkerPool) -> None:
    pairs = [
        (r"\boxed{2x+x^2}", "x^2+2x", True),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", True),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", True),
        (r"\boxed{x^2}", "x^3", False),
        (r"\boxed{18 dollars}", "18", True),
        (r"\boxed{}", "5", False),
    ]
    samples = [make_sample(text, answer=answer) for text, answer, _ in pairs]
    assert [o.correct for o in build(pool, "math", answer_in="boxed").score(samples)] == [x for _, _, x in pairs]
    exact = build(pool, "exact_answer", answer_in="boxed").score(samples)
    assert [o.correct for o in exact] == [False, False, False, False, True, False]
    whole = build(pool, "math", answer_in="whole")
    assert whole.score([make_sample("I think it is 5.", answer="5")])[0].correct


def test_a_formula_that_cannot_be_worked_out_is_wrong_and_runs_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = f"__import__('pathlib').Path('{mark}').touch()"
    texts = [r"\boxed{9^{9^{9^{9}}}}", rf"\boxed{{{code}}}", code]
    got = build(pool, "math", answer_in="boxed").score([make_sample(text, answer="5") for text in texts])
    got += build(pool, "math", answer_in="whole").score([make_sample(code, answer="5")])
    assert [outcome.value for outcome in got] == [0.0, 0.0, 0.0, 0.0]
    assert not mark.exists()


@pytest.mark.parametrize("name", ["exact_answer", "math"])
def test_rows_without_an_answer_abstain(pool: WorkerPool, name: str) -> None:
    component = build(pool, name, answer_in="whole")
    got = component.score([make_sample("5"), make_sample("5", answer=" "), make_sample("5", answer="5")])
    assert got[:2] == [ABSTAINED, ABSTAINED]
    assert got[2].value == 1.0


def _changed(solution: str) -> str:
    """The solution with another last number: one digit more in front."""
    before, _, last = solution.rpartition("####")
    place = next(i for i, char in enumerate(last) if char.isdigit())
    return f"{before}####{last[:place]}7{last[place:].replace(',', '')}"


def _check_solutions(pool: WorkerPool, solutions: list[str]) -> None:
    right = [make_sample(solution, answer=solution) for solution in solutions]
    wrong = [make_sample(_changed(solution), answer=solution) for solution in solutions]
    for name in ("exact_answer", "math"):
        component = build(pool, name, answer_in="hashes")
        assert {outcome.value for outcome in component.score(right)} == {1.0}
        assert {outcome.value for outcome in component.score(wrong)} == {0.0}


def test_own_gsm8k_rows_score_one_and_zero_once_changed(pool: WorkerPool) -> None:
    solutions = [json.loads(line)["answer"] for line in OWN_ROWS.read_text().splitlines()]
    assert len(solutions) == 12
    _check_solutions(pool, solutions)


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not part of klimb; the test reads it from beside the checkout")
def test_every_gsm8k_test_solution_scores_one_and_zero_once_changed(pool: WorkerPool) -> None:
    solutions = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    assert len(solutions) == 1319
    _check_solutions(pool, solutions)


def test_regex_and_a_catastrophic_pattern() -> None:
    with WorkerPool(workers=1, timeout_seconds=1.0) as pool:
        polite = build(pool, "regex", pattern=r"(?i)\bplease\b", on_match=0.5)
        got = polite.score([make_sample("Please."), make_sample("pleased")])
        assert [(o.value, o.correct) for o in got] == [(0.5, None), (0.0, None)]
        bad = build(pool, "regex", pattern=r"(a+)+$")
        start = time.perf_counter()
        got = bad.score([make_sample("a" * 40 + "b"), make_sample("aa")])
        assert time.perf_counter() - start < 10.0
        assert got[0].failure is not None
        assert got[0].failure.kind == "timeout"
        assert got[1].value == 1.0


def test_length_penalties(pool: WorkerPool) -> None:
    samples = [make_sample("x" * n, response_ids=(4,) * max(n, 1)) for n in (2, 4, 5, 6, 8, 100)]
    limit = build(pool, "length", max=4)
    assert [o.value for o in limit.score(samples)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    target = build(pool, "length", target=4, unit="chars")
    assert [o.value for o in target.score(samples)] == [-0.5, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_task_verifier_from_args_or_from_the_row(pool: WorkerPool) -> None:
    task = load_task("task:arithmetic")
    row = task.rows("eval", 1)[0]
    assert row.answer is not None
    sample = make_sample("nonsense", answer=row.answer, extra=row.extra, source="task:arithmetic")
    by_row = build(pool, "task").score([sample, make_sample("5", source="rows.jsonl")])
    assert by_row[0].correct is False
    assert by_row[1].failure is not None
    assert "rows.jsonl" in by_row[1].failure.detail
    judged = task.score(row.answer, row.answer, row.extra)
    named = make_sample(row.answer, answer=row.answer, extra=row.extra, source="copy.jsonl")
    (got,) = build(pool, "task", name="arithmetic").score([named])
    assert (got.value, got.correct) == (judged.value, judged.correct)


def test_gym_verifier_runs_in_the_pool_and_names_are_checked_at_start() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is the extra 'gym'")
    row = load_task("gym:leg_counting").rows("eval", 1)[0]
    with WorkerPool(workers=1, timeout_seconds=60.0) as pool:
        with pytest.raises(RewardError, match="Nearest: leg_counting"):
            build(pool, "gym", name="leg_countin")
        component = build(pool, "gym", name="leg_counting")
        right = f"<answer>{row.answer}</answer>"
        got = component.score([make_sample(text, answer=row.answer, extra=row.extra) for text in (right, "none")])
    assert [outcome.correct for outcome in got] == [True, False]
