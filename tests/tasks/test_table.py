import json
import subprocess
import sys

import pytest

from klimb.errors import DataError, MissingExtra
from klimb.tasks import load_task


@pytest.mark.parametrize("spec", ["task:arithmetic", "task:instructions", "gym:leg_counting"])
def test_splits_are_disjoint_deterministic_and_plain(spec):
    task = load_task(spec)
    assert task.name == spec
    train, held_out = task.rows("train", None), task.rows("eval", None)
    assert len(train) >= 1_000
    assert len(held_out) >= 100
    assert not {row.prompt for row in train} & {row.prompt for row in held_out}
    assert task.rows("train", 7) == train[:7]
    assert all(json.loads(json.dumps(row.extra)) == row.extra for row in held_out)
    code = f"from klimb.tasks import load_task; print(repr(load_task({spec!r}).rows('eval', 5)))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == repr(held_out[:5])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("task:arithmetics", ["task:arithmetics", "Did you mean task:arithmetic?"]),
        ("tasks:instruction", ["Did you mean task:instructions?", "gym:NAME"]),
        ("gym:", ["gym:NAME"]),
        ("arithmetic", ["task:arithmetic"]),
        ("gym:leg_countin", ["Nearest: leg_counting", "gym:leg_countin"]),
        ("gym:qqqq", ["such as"]),
    ],
)
def test_unknown_names(spec, words):
    with pytest.raises(DataError) as caught:
        load_task(spec)
    assert all(word in str(caught.value) for word in words)


def test_limit_below_one():
    with pytest.raises(DataError, match="1 or more, got 0"):
        load_task("task:arithmetic").rows("train", 0)


def test_without_reasoning_gym(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'klimb\[gym\]'"):
        load_task("gym:leg_counting")


def test_tasks_import_nothing_heavy():
    code = (
        "import sys; from klimb.tasks import load_task; load_task('task:arithmetic').rows('train', 1); "
        "print([m for m in ('torch', 'transformers', 'datasets', 'reasoning_gym', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
