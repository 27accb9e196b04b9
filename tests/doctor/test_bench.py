"""The doctor's promises, judged on the kept tables of the bench: seeds that no threshold was chosen on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "doctor" / "judge.py"


@pytest.mark.slow
def test_faults_are_named_and_sound_runs_are_left_alone() -> None:
    out = subprocess.run(
        [sys.executable, str(BENCH), "--packed"], capture_output=True, text=True, timeout=500, check=True
    ).stdout
    named = re.search(r"fault named first or second: (\d+)/(\d+)", out)
    alarmed = re.search(r"healthy runs with an alarm: +(\d+)/(\d+)", out)
    delay = re.search(r"median delay from onset to alarm: ([\d.]+) steps", out)
    assert named is not None
    assert alarmed is not None
    assert delay is not None
    assert int(named[2]) >= 40
    assert int(alarmed[2]) >= 40
    assert int(named[1]) >= 0.95 * int(named[2]), out
    assert int(alarmed[1]) <= 0.02 * int(alarmed[2]), out
    assert float(delay[1]) < 10, out
