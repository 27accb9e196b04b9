"""A formula fits on a screen: no function of the maths is longer than 40 lines."""

import ast
from pathlib import Path

import pytest

import klimb.algos

LONGEST = 40
FILES = sorted(Path(klimb.algos.__file__).parent.glob("*.py"))


def lengths(source: str) -> dict[str, int]:
    """Name and line -> lines from `def` to the last, the docstring among them."""
    return {
        f"{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_function_of_the_maths_is_long(path):
    found = lengths(path.read_text(encoding="utf-8"))
    assert found or path.name == "__init__.py"
    assert {name: n for name, n in found.items() if n > LONGEST} == {}


def test_lines_are_counted_from_the_first_to_the_last():
    assert lengths("def f():\n    def g():\n        pass\n\n    return g\n") == {"f:1": 5, "g:2": 2}
