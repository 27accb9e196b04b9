"""Names and args in reward_model.functions: what is made of them and what is refused."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from klimb.errors import ConfigError, KlimbError
from klimb.reward.table import FUNCTIONS, FunctionSpec, make_component, make_components
from klimb.reward.workers import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(workers=1, timeout_seconds=5.0) as pool:
        yield pool


def test_every_component_has_a_name_of_its_own(pool: WorkerPool) -> None:
    specs = [
        FunctionSpec(name="regex", args={"pattern": "a"}),
        FunctionSpec(name="length", args={"max": 4}, weight=0.1),
        FunctionSpec(name="regex", args={"pattern": "b"}),
        FunctionSpec(name="http://localhost:8000/score"),
        FunctionSpec(name="http://localhost:8000/other"),
        FunctionSpec(name="exact_answer", args={"answer_in": "tag", "tag": "out"}),
    ]
    made = make_components(specs, pool)
    assert [c.name for c in made] == [
        "regex",
        "length",
        "regex#2",
        "http.localhost:8000",
        "http.localhost:8000#2",
        "exact_answer",
    ]
    assert [c.weight for c in made] == [1.0, 0.1, 1.0, 1.0, 1.0, 1.0]
    assert [c.verifies for c in made] == [False, False, False, False, False, True]
    for component in made:
        component.close()


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("exact_anser", {}, "Did you mean 'exact_answer'"),
        ("nothing_like_it", {}, ", ".join(FUNCTIONS)),
        ("exact_answer", {}, "the arg 'answer_in' is missing. Args: answer_in (boxed | hashes | last_number"),
        ("math", {"answer_in": "box"}, "found 'box'"),
        ("math", {"answer_in": "boxed", "tga": "x"}, "unknown arg 'tga', did you mean 'tag'?"),
        ("exact_answer", {"answer_in": "tag", "tag": "<a>"}, "args.tag"),
        ("regex", {"pattern": "("}, "no regular expression: missing ), unterminated subpattern at position 0"),
        ("regex", {"pattern": 5}, "args.pattern"),
        ("length", {}, "exactly one of target and max"),
        ("length", {"max": 3, "target": 3}, "exactly one of target and max"),
        ("length", {"max": 0}, "args.max"),
        ("length", {"max": 3, "unit": "words"}, "unit (tokens | chars"),
        ("task", {"name": "arithmetik"}, "task:arithmetic"),
        ("http://", {}, "names no host"),
        ("http://host", {"batch_size": 0}, "args.batch_size"),
    ],
)
def test_refused(pool: WorkerPool, name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(KlimbError) as error:
        make_component(FunctionSpec(name=name, args=args), pool)
    assert message in str(error.value)


def test_weight_must_be_finite(pool: WorkerPool) -> None:
    with pytest.raises(ConfigError, match="weight is nan"):
        make_component(FunctionSpec(name="length", args={"max": 3}, weight=float("nan")), pool)


def test_worker_modules_are_light() -> None:
    code = (
        "import sys, klimb.reward.table, klimb.reward.worker_side; "
        "print([m for m in ('torch', 'transformers', 'sympy', 'numpy', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
