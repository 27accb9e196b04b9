"""How good estimates are: constants from the configs they were fitted on, judged on those kept back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from klimb.estimate.fitted import FITTED

BENCH = Path(__file__).parents[2] / "benchmarks" / "plan"


def bench(*words: str) -> str:
    """The output of one of the bench's programs."""
    command = [sys.executable, str(BENCH / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def test_the_constants_are_those_that_the_kept_measurements_give() -> None:
    found = dict(re.findall(r'"(\w+)": ([\d.e+-]+),', bench("fit.py", "--dry")))
    assert found.keys() == FITTED.keys()
    for name, value in found.items():
        assert FITTED[name] == pytest.approx(float(value), rel=1e-3), name


def test_configs_that_were_kept_back_are_estimated_well() -> None:
    """Asked for: peaks within 15%, steps within 25%, on at least six."""
    out = bench("judge.py")
    found = re.search(r"(\d+) configs kept back: memory within 15% in (\d+), time within 25% in (\d+)", out)
    assert found is not None
    judged, memory, time = (int(x) for x in found.groups())
    assert judged >= 6
    assert memory == judged, out
    assert time == judged, out


def test_what_is_fitted_is_decided_by_names_alone() -> None:
    rows = bench("cases.py").splitlines()
    kinds = [row.split()[0] for row in rows]
    assert kinds.count("fitted") == 8
    assert len(rows) >= 12
    measured = json.loads((BENCH / "measured.json").read_text(encoding="utf-8"))
    assert set(measured) <= {re.findall(r"^\w+ (\S+)", row)[0] for row in rows}


@pytest.mark.slow
def test_a_run_made_now_needs_the_memory_that_is_estimated() -> None:
    """Memory only: how long it takes depends on who else uses the machine."""
    out = bench("check.py", "grpo-cached-3m-recompute")
    found = re.search(r"memory ([+-]\d+)%", out)
    assert found is not None, out
    assert abs(int(found[1])) <= 15, out
