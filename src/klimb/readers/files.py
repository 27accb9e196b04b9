"""jsonl, json, csv and trainer_state.json, read a line at a time where the form allows it."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from klimb.errors import DataError
from klimb.readers.columns import Columns
from klimb.readers.names import STEP_KEYS
from klimb.report.lines import number as number_of_log

LINE = 4 * 2**20
"""Longest line that is read, in characters: no row of metrics comes near it."""
WHOLE = 32 * 2**20
"""Largest file that has to be read whole, in bytes."""
DEEP = 6
TWINS = ("__MIN", "__MAX")
PREFIX = re.compile(r"^(.{1,200}?) - ")
"""The run's name before a column of a W&B export."""


@dataclass
class Sheet:
    """What of a file could be read, and what could not. named: values of rows that name a whole step; counted: of rows
    that do not, at their number."""

    named: Columns = field(default_factory=Columns)
    counted: Columns = field(default_factory=Columns)
    rows: int = 0
    without_step: int = 0
    damaged: int = 0
    first: int = 0
    cut: bool = False
    notes: list[str] = field(default_factory=list[str])

    def put(self, row: Mapping[Any, Any]) -> None:
        """All numbers of one row, at its step."""
        self.rows += 1
        values = dict(flat(row))
        steps = (number(values[key]) for key in STEP_KEYS if key in values)
        step = next((s for s in steps if s is not None and math.isfinite(s)), None)
        is_named = step is not None and step == int(step)
        self.without_step += not is_named
        columns, at = (self.named, int(step)) if is_named and step is not None else (self.counted, self.rows)
        for name, value in values.items():
            if name not in STEP_KEYS and (found := number(value)) is not None:
                columns.put(name, at, found)

    def refuse(self, line: int) -> None:
        self.damaged += 1
        self.first = self.first or line

    def columns(self) -> Columns:
        """Rows of one kind only: steps and numbers of rows are not to be mixed."""
        return self.counted if 2 * self.without_step > self.rows else self.named

    def sentences(self, name: str) -> list[str]:
        out = list(self.notes)
        if self.damaged:
            lines = "1 line is" if self.damaged == 1 else f"{self.damaged:,} lines are"
            out.append(f"{name}: {lines} not readable and left out, the first is line {self.first}")
        if self.cut:
            out.append(f"{name}: the last line is cut off and was left out")
        if 2 * self.without_step > self.rows:
            left = f"; {self.rows - self.without_step:,} others are left out" if self.without_step < self.rows else ""
            out.append(f"{name}: {self.without_step:,} rows name no whole step and are counted instead{left}")
        elif self.without_step:
            out.append(f"{name}: {self.without_step:,} rows name no whole step and are left out")
        if dropped := self.columns().dropped:
            out.append(f"{name}: {dropped:,} values are left out: too many series, or names or steps too long")
        return out


def number(value: Any) -> float | None:
    """A finite or non-finite number, also as text."""
    if isinstance(value, bool):
        return None
    if not isinstance(value, str):
        return number_of_log(value)
    try:
        return float(value)
    except ValueError:
        return None


def flat(row: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Names joined by a slash; a lone `data` is the row itself, as verl's file logger writes it."""
    for key, value in row.items():
        name = prefix if key == "data" and depth == 0 else f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, dict) and depth < DEEP:
            yield from flat(value, name, depth + 1)
        elif name:
            yield name, value


def read_jsonl(path: Path) -> Sheet:
    """One object a line. Lines that are no object, and a last one that is cut off, are left out and counted."""
    sheet, count = Sheet(), 0
    with path.open("rb") as file:
        while line := file.readline(LINE):
            count += 1
            whole = line.endswith(b"\n")
            if not whole and len(line) == LINE:
                sheet.refuse(count)
                while (rest := file.readline(LINE)) and not rest.endswith(b"\n"):
                    pass
                continue
            try:
                found = json.loads(line.removeprefix(b"\xef\xbb\xbf") if count == 1 else line)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                sheet.put(found)
            elif not whole:
                sheet.cut = True
            elif line.strip():
                sheet.refuse(count)
    return sheet


def read_json(path: Path) -> Sheet:
    """A list of rows, or transformers' trainer_state.json with its log_history."""
    size = path.stat().st_size
    if size > WHOLE:
        raise DataError(
            f"{path}: {size / 2**20:,.0f} MiB, and a .json has to be read whole (at most {WHOLE / 2**20:.0f} MiB). "
            "Give the TensorBoard folder of the same run, or jsonl with one row a line"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); the file may be cut off") from None
    rows = found.get("log_history") if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise DataError(f"{path}: needed: a list of rows, or a log_history as transformers writes it; neither is there")
    sheet = Sheet()
    for count, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            sheet.put(row)
        else:
            sheet.refuse(count)
    return sheet


def read_csv(path: Path) -> Sheet:
    """A header and a row a step. Columns of a W&B export lose the run's name, and their __MIN and __MAX twins."""
    sheet = Sheet()
    with path.open("r", encoding="utf-8-sig", errors="replace", newline="") as file:
        delimiter = _delimiter(file)
        rows = csv.reader(_bounded(file), delimiter=delimiter)
        try:
            names = _header(next(rows, []), path)
        except csv.Error as error:
            raise DataError(f"{path}:1: no header of metric names ({error})") from None
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                break
            except csv.Error:
                sheet.refuse(rows.line_num)
                continue
            if len(cells) > len(names):
                sheet.refuse(rows.line_num)
                continue
            if delimiter == ";":
                cells = [cell.replace(",", ".") for cell in cells]
            sheet.put({n: c for n, c in zip(names, cells, strict=False) if n and c != ""})
    return sheet


def _header(cells: list[str], path: Path) -> list[str]:
    """Names of the columns, "" for one to leave out. DataError for what is no header, and for two runs in one."""
    runs = {match.group(1) for cell in cells if (match := PREFIX.match(cell)) and not cell.endswith(TWINS)}
    if len(runs) > 1:
        raise DataError(
            f"{path}:1: {len(runs)} runs in one file: {', '.join(sorted(runs))}. Export one of them, or cut the "
            "columns of the others"
        )
    names = [_clean(cell) for cell in cells]
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise DataError(f"{path}:1: {', '.join(twice)} stands twice in the header; leave one of them")
    known = any(name in STEP_KEYS or "/" in name for name in names)
    if not known and len(names) < 2:
        raise DataError(f"{path}:1: no header of metric names; found: {', '.join(names)[:200] or 'an empty line'}")
    return names


def _delimiter(file: TextIO) -> str:
    """From the first line, which is left to be read; Excel's own line, that names it, is passed over."""
    first = file.readline(64 * 1024)
    if first.lower().startswith("sep="):
        return first.strip()[4:5] or ";"
    file.seek(0)
    return max(",\t;", key=first.count)


def _bounded(file: TextIO) -> Iterator[str]:
    """Lines of at most LINE characters; what is longer comes in pieces, which no row fits."""
    while line := file.readline(LINE):
        yield line.replace("\0", "")


def _clean(name: str) -> str:
    name = PREFIX.sub("", name.strip())
    return "" if name.endswith(TWINS) else name
