"""Data walks down: a room imports only from rooms above it. Files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "klimb"
ROOMS: tuple[tuple[str, ...], ...] = (
    ("version",),
    ("errors",),
    ("types", "seeds", "malloc", "cut", "ranks", "offload", "host"),
    ("config",),
    ("doctor",),
    ("estimate",),
    ("algos",),
    ("tasks",),
    ("data", "models"),
    ("rollout", "reward"),
    ("batch", "recipe"),
    ("selection",),
    ("learn", "fallback"),
    ("ladder",),
    ("update",),
    (
        "evaluation",
        "checkpoint",
        "runlog",
        "console",
        "describe",
        "follow",
        "clock",
        "interrupt",
        "floor",
        "watch",
        "exhaustion",
        "sharded_state",
    ),
    ("snapshot", "derive"),
    ("run",),
    ("phase", "guard", "outlook"),
    ("loop",),
    ("playground",),
    ("build", "processes"),
    ("cluster",),
    ("launch", "export", "prepare"),
    ("report",),
    ("readers", "comparison"),
    ("cli",),
    ("__main__",),
)
"""From top to bottom; rooms of one line never meet."""
PLACE = {room: depth for depth, rooms in enumerate(ROOMS) for room in rooms}
FILES = sorted(SOURCE.rglob("*.py"))
LAZY = "__init__"
"""klimb/__init__.py names public things by string and imports nothing at run time but the version."""


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name below klimb of every import, those for types and inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            if node.module == "klimb":
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif node.module and node.module.startswith("klimb."):
                yield node.lineno, node.module.removeprefix("klimb.")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "klimb":
                    yield node.lineno, alias.name.removeprefix("klimb.")


def test_every_room_has_its_place() -> None:
    assert {room_of(path) for path in FILES} - {LAZY} == set(PLACE)


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) != LAZY], ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_imports_only_from_rooms_above_it(path: Path) -> None:
    room = room_of(path)
    for line, name in imported(path):
        other = name.split(".")[0]
        assert other in PLACE, f"{path}:{line}: imports klimb.{name}, which has no place in ROOMS"
        assert other == room or PLACE[other] < PLACE[room], f"{path}:{line}: {room} imports {other}, which is below it"


def test_files_of_a_room_import_each_other_without_a_circle() -> None:
    """At import time; what a function imports when it is called cannot make a circle."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        top = ast.Module(body=ast.parse(path.read_text(encoding="utf-8")).body, type_ignores=[])
        found: set[str] = set()
        for node in top.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "klimb":
                base = node.module.removeprefix("klimb").removeprefix(".")
                found |= {".".join(filter(None, (base, alias.name))) for alias in node.names} | {base}
        graph[name] = found
    graph = {name: {other for other in found if other in graph and other != name} for name, found in graph.items()}
    while graph:
        leaves = {name for name, found in graph.items() if not found & graph.keys()}
        assert leaves, f"these import each other in a circle: {sorted(graph)}"
        graph = {name: found for name, found in graph.items() if name not in leaves}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_are_small_and_plain(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length < 80, f"{path}:{node.lineno}: {node.name} has {length} lines"
    assert path.name not in ("utils.py", "helpers.py", "common.py")
    assert ast.get_docstring(ast.parse(text)), f"{path}: no module docstring"
    for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X"):
        assert word not in text


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted(name for name in sys.modules if '.' not in name or 'klimb' in name))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


HEAVY = {"torch", "transformers", "datasets", "numpy", "pandas", "accelerate", "vllm", "ray"}
LIGHT = {
    "the package": "import klimb; klimb.__version__",
    "the public config": "import klimb; klimb.RunConfig",
    "all of klimb.config": "from klimb.config import advice, counts, guard, load, paths, posture, schema",
    "all of klimb.tasks": "import klimb.tasks, klimb.tasks.arithmetic, klimb.tasks.instructions, klimb.tasks.gym",
    "errors and the console": "import klimb.errors, klimb.console",
    "all of klimb.estimate": (
        "from klimb.estimate import changes, duration, fitted, forecast, gpus, memory, setup, shapes, show"
    ),
    "the report": "from klimb.report import charts, files, overview, page, picture, serve",
}


READING = "from klimb.readers import columns, diagnose, events, files, log, names, settings; import klimb.doctor.rules"


def test_the_doctor_and_its_readers_need_no_model_library() -> None:
    """They work with arrays, so numpy may come along."""
    assert not loaded_after(READING) & (HEAVY - {"numpy"})


@pytest.mark.parametrize("code", LIGHT.values(), ids=LIGHT.keys())
def test_light_rooms_import_nothing_heavy(code: str) -> None:
    assert not loaded_after(code) & HEAVY


def test_public_names_load_on_first_use() -> None:
    names = loaded_after("import klimb")
    assert {name for name in names if name.startswith("klimb")} == {"klimb", "klimb.version"}
    used = loaded_after("import klimb; klimb.RunConfig")
    assert "klimb.config.schema" in used
    assert "klimb.launch" not in used


def test_every_public_name_is_there_and_others_are_refused() -> None:
    import klimb

    for name in klimb.__all__:
        assert getattr(klimb, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'trian'; public names: .*train"):
        _ = klimb.trian  # type: ignore[attr-defined]
