"""jsonl, json, csv and trainer_state.json, read a line at a time where the form allows it."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klimb.errors import DataError
from klimb.readers.columns import Columns
from klimb.readers.names import STEP_KEYS

LINE = 4 * 2**20
"""Longest line that is read, in characters: no row of metrics comes near it."""
WHOLE = 256 * 2**20
"""Largest file that has to be read whole, in bytes."""
DEEP = 6
NUMBERS = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}


@dataclass
class Problems:
    """What of a file could not be read."""

    damaged: int = 0
    first: int = 0
    cut: bool = False
    no_step: int = 0
    notes: list[str] = field(default_factory=list[str])

    def refuse(self, line: int) -> None:
        self.damaged += 1
        self.first = self.first or line

    def sentences(self, name: str) -> list[str]:
        out = list(self.notes)
        if self.damaged:
            lines = "1 line is" if self.damaged == 1 else f"{self.damaged:,} lines are"
            out.append(f"{name}: {lines} not readable and left out, the first is line {self.first}")
        if self.cut:
            out.append(f"{name}: the last line is cut off and was left out")
        if self.no_step:
            out.append(f"{name}: {self.no_step:,} rows name no step; rows are counted instead")
        return out


def number(value: Any) -> float | None:
    """A finite or non-finite number, also as text."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in NUMBERS:
            return NUMBERS[text.lower()]
        try:
            return float(text)
        except ValueError:
            return None
    return None


def flat(row: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Names joined by a slash; a lone `data` is the row itself, as verl's file logger writes it."""
    for key, value in row.items():
        name = prefix if key == "data" and depth == 0 else f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, dict) and depth < DEEP:
            yield from flat(value, name, depth + 1)
        elif name:
            yield name, value


def put_row(columns: Columns, row: Mapping[Any, Any], count: int, problems: Problems) -> None:
    """All numbers of one row, at its step."""
    values = dict(flat(row))
    step = next((number(values[key]) for key in STEP_KEYS if key in values and number(values[key]) is not None), None)
    if step is None or not math.isfinite(step) or abs(step) > 2**52:
        problems.no_step += 1
        step = count
    for name, value in values.items():
        if name not in STEP_KEYS and (found := number(value)) is not None:
            columns.put(name, int(step), found)


def read_jsonl(path: Path, columns: Columns) -> Problems:
    """One object a line. Lines that are no object, and a last one that is cut off, are left out and counted."""
    problems, count, row = Problems(), 0, 0
    with path.open("rb") as file:
        while line := file.readline(LINE):
            count += 1
            whole = line.endswith(b"\n")
            if not whole and len(line) == LINE:
                problems.refuse(count)
                while (rest := file.readline(LINE)) and not rest.endswith(b"\n"):
                    pass
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                row += 1
                put_row(columns, found, row, problems)
            elif not whole:
                problems.cut = True
            elif line.strip():
                problems.refuse(count)
    return problems


def read_json(path: Path, columns: Columns) -> Problems:
    """A list of rows, or transformers' trainer_state.json with its log_history."""
    size = path.stat().st_size
    if size > WHOLE:
        raise DataError(
            f"{path}: {size / 2**20:,.0f} MiB, and a .json has to be read whole (at most {WHOLE / 2**20:.0f} MiB). "
            "Give the TensorBoard folder of the same run, or jsonl with one row a line"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); the file may be cut off") from None
    rows = found.get("log_history") if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise DataError(f"{path}: needed: a list of rows, or a log_history as transformers writes it; neither is there")
    problems = Problems()
    for count, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            put_row(columns, row, count, problems)
        else:
            problems.refuse(count)
    return problems


def read_csv(path: Path, columns: Columns) -> Problems:
    """A header and a row a step. Columns of a W&B export lose the run's name, and their __MIN and __MAX twins."""
    problems = Problems()
    with path.open("r", encoding="utf-8-sig", errors="replace", newline="") as file:
        sample = file.read(64 * 1024)
        delimiter = _delimiter(sample)
        file.seek(0)
        rows = csv.reader(_without_nul(file), delimiter=delimiter)
        header = next(rows, [])
        names = [_clean(name) for name in header]
        if len(set(names) & set(STEP_KEYS)) == 0 and not any("/" in name for name in names) and len(names) < 2:
            raise DataError(f"{path}:1: no header of metric names; found: {', '.join(names)[:200] or 'an empty line'}")
        count = 0
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                break
            except csv.Error:
                problems.refuse(rows.line_num)
                continue
            count += 1
            if len(cells) > len(names):
                problems.refuse(rows.line_num)
                continue
            put_row(columns, {n: c for n, c in zip(names, cells, strict=False) if n and c != ""}, count, problems)
    return problems


def _delimiter(sample: str) -> str:
    first = sample.split("\n", 1)[0]
    return max(",\t;", key=first.count)


def _without_nul(file: io.TextIOBase) -> Iterator[str]:
    for line in file:
        yield line[:LINE].replace("\0", "")


def _clean(name: str) -> str:
    name = re.sub(r"^.* - ", "", name.strip())
    return "" if name.endswith(("__MIN", "__MAX")) else name
