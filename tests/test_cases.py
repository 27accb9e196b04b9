"""The faults from public bug reports that klimb must not have: each is a test with its id in its name."""

import ast
import re
from pathlib import Path

import pytest

IDS = (
    *("LN-01", "LN-02", "KC-01", "KC-02", "KE-01", "KE-02", "KE-03", "KE-04", "LP-01", "LP-02", "LP-03", "LP-04"),
    *("PC-01", "MK-01", "MK-02", "MK-03", "RP-01", "RF-01", "RF-02", "RF-03", "GV-01", "GV-02", "GV-03", "GA-01"),
    *("GA-02", "CR-01", "CR-02", "CR-03", "CR-04", "CR-05", "LR-01", "OS-01", "CF-01", "CF-02", "DT-01", "DT-02"),
    *("DT-03", "MT-01", "MT-02", "RN-01", "RM-01", "WS-01", "TR-01"),
)
FOUND = {
    case
    for path in Path(__file__).parent.rglob("test_*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_case")
    for case in re.findall(r"[A-Z]{2}_\d{2}", node.name)
}


@pytest.mark.parametrize("case", IDS)
def test_every_case_is_a_test(case: str) -> None:
    assert case.replace("-", "_") in FOUND


def test_there_are_forty_three_and_no_test_names_another() -> None:
    assert len(set(IDS)) == 43
    assert {case.replace("-", "_") for case in IDS} == FOUND
