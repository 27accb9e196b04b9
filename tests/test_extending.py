"""docs/extending.md: its blocks go where they say, and a run trains with them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import klimb
from klimb.algos import loss, table
from klimb.algos.loss import policy_loss
from klimb.config import facts
from klimb.errors import ConfigError
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
PLACES: dict[str, ModuleType] = {
    "src/klimb/algos/loss.py": loss,
    "src/klimb/algos/table.py": table,
    "src/klimb/config/facts.py": facts,
}


def blocks() -> list[tuple[str, str]]:
    """(place, code) of every block of Python on the page."""
    found = re.findall(r"```python\n# ([^\n]+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(found) == 7
    return found


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as it is with the page's blocks in it."""
    for place, code in blocks():
        path, _, line_of = place.partition(", a line of ")
        if path not in PLACES:
            continue
        module = PLACES[path]
        if not line_of:
            space: dict[str, Any] = {}
            exec(compile(code, place, "exec"), vars(module) | {"__name__": module.__name__}, space)
            for name, value in space.items():
                monkeypatch.setattr(module, name, value, raising=False)
            continue
        for name, value in eval("{" + code + "}", vars(module)).items():
            assert name not in getattr(module, line_of)
            monkeypatch.setitem(getattr(module, line_of), name, value)


@pytest.mark.usefixtures("extended")
def test_the_pages_own_test_passes() -> None:
    (code,) = [code for place, code in blocks() if place.startswith("tests/")]
    space: dict[str, Any] = {"math": math, "pytest": pytest, "tensor": torch.tensor, "policy_loss": policy_loss}
    exec(code, space)
    space["test_penalty_by_hand"]()


@pytest.mark.usefixtures("extended")
def test_a_run_trains_with_what_the_page_added(tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs")
    model = build_tiny_model(tmp_path / "model")

    def run(name: str, **changes: Any) -> list[dict[str, Any]]:
        always = {"training.total_episodes": 16, "data.eval_files": [], "run.name": name}
        return rows(klimb.train(tiny_config(model, tmp_path / "inputs", tmp_path / "runs", **always, **changes)).folder)

    penalty = {"algorithm.policy_loss": "penalty", "algorithm.adv_estimator": "batch_mean"}
    weak = run("weak", **penalty, **{"algorithm.loss_args": {"strength": 0.1}})
    strong = run("strong", **penalty, **{"algorithm.loss_args": {"strength": 1e4}})
    assert "policy/penalised" in weak[0]
    assert "value/loss" not in weak[0], "it said that it needs no critic"
    assert strong[-1]["policy/ratio_abs_dev"] < weak[-1]["policy/ratio_abs_dev"]
    with pytest.raises(ConfigError, match="did you mean 'strength'"):
        run("typo", **penalty, **{"algorithm.loss_args": {"strenth": 1.0}})
    with pytest.raises(ConfigError, match="greater than 0"):
        run("range", **penalty, **{"algorithm.loss_args": {"strength": 0}})


def test_nothing_of_it_is_left_behind() -> None:
    assert "penalty" not in loss.POLICY_LOSSES
    assert "batch_mean" not in facts.ESTIMATORS
