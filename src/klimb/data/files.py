"""Readers: jsonl, json, parquet, csv, a folder saved by `datasets`, and the built-in tasks.

Every reader returns the file's records and its column names; rows.py checks what is in them, so that all
kinds of file give the same errors. Nothing here unpickles or runs code from a file.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from klimb.data.rows import DataSettings, RawRow, checked_rows, nearest
from klimb.errors import DataError
from klimb.tasks.base import Split
from klimb.tasks.table import load_task

__all__ = ["DataSettings", "RawRow", "Split", "read_rows"]

Records = list[dict[str, Any]]
Table = tuple[Records, list[str]]

TASK_PREFIXES = ("task:", "gym:")
EVAL_SPLITS = ("eval", "validation", "test")


def read_rows(spec: str, split: Split, settings: DataSettings, needs_answer: bool) -> list[RawRow]:
    """All rows of one entry of `data.train_files` or `data.eval_files`, in file order.

    spec: a path, `task:NAME` or `gym:NAME`. split: which half of a task, or of a folder that holds several
    splits; a plain file has only one. needs_answer: whether some reward reads the answer.
    Raises DataError naming the file and the line or row.
    """
    if spec.startswith(TASK_PREFIXES):
        return _task_rows(spec, split, needs_answer)
    path = Path(spec).expanduser()
    if not path.exists():
        raise DataError(_missing(spec, path, split))
    if path.is_dir():
        records, columns = _read_datasets_folder(path, spec, split)
    else:
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            suffix = path.suffix or "no suffix"
            raise DataError(
                f"{spec}: unknown kind of file ({suffix}).{nearest(path.suffix.lower(), list(READERS))} "
                f"Allowed: {', '.join(READERS)}, a folder saved by datasets, task:NAME, gym:NAME."
            )
        try:
            records, columns = reader(path, spec)
        except OSError as error:
            raise DataError(f"{spec}: cannot be read: {error.strerror or error}.") from error
    return checked_rows(records, spec, columns, settings, needs_answer)


def _task_rows(spec: str, split: Split, needs_answer: bool) -> list[RawRow]:
    rows = load_task(spec).rows(split, None)
    if needs_answer and any(row.answer is None for row in rows):
        raise DataError(
            f"{spec}: this task has no reference answers, and a reward of this run compares with them. "
            "Use the task's own verifier as the reward."
        )
    return [
        RawRow(source=spec, index=index, prompt=row.prompt, answer=row.answer, extra=dict(row.extra))
        for index, row in enumerate(rows)
    ]


def _missing(spec: str, path: Path, split: Split) -> str:
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    wanted = path.relative_to(folder).parts[0]
    return (
        f"{spec} (data.{split}_files) does not exist.{nearest(wanted, [n.rstrip('/') for n in names])} "
        f"In {folder.resolve()} there is: {shown or 'nothing'}."
    )


def _text(path: Path, spec: str) -> str:
    """The file as text, byte order mark removed. Raises DataError with the line of the first bad byte."""
    raw = path.read_bytes()
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{spec}: the file is UTF-16 by its byte order mark. Save it as UTF-8.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(re.findall(rb"\r\n|\n|\r", raw[: error.start])) + 1
        raise DataError(
            f"{spec}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8 ({error.reason}). Save the file as UTF-8."
        ) from None


def _columns(records: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record))


def _read_jsonl(path: Path, spec: str) -> Table:
    # str.splitlines would also split at U+2028 and its like, which JSON strings may hold unescaped.
    lines = re.split(r"\r\n|\n|\r", _text(path, spec))
    records: Records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise DataError(
                f"{spec}, line {number}: not valid JSON: {reason}. Each line must be one JSON object."
            ) from None
        if not isinstance(record, dict):
            raise DataError(f"{spec}, line {number}: found a {type(record).__name__}; each line must be a JSON object.")
        records.append(cast("dict[str, Any]", record))
    return records, _columns(records)


def _read_json(path: Path, spec: str) -> Table:
    try:
        content = json.loads(_text(path, spec))
    except json.JSONDecodeError as error:
        hint = " One object per line is JSON lines: name the file .jsonl." if error.msg == "Extra data" else ""
        raise DataError(
            f"{spec}, line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}.{hint}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{spec}: not valid JSON: {error}.") from None
    form = 'the file must hold a list of objects, or {"data": [list of objects]}'
    if isinstance(content, dict):
        if "data" not in content:
            keys = ", ".join(list(cast("dict[str, Any]", content))[:10]) or "none"
            raise DataError(f"{spec}: found one object with the keys {keys}; {form}.")
        content = cast("dict[str, Any]", content)["data"]
    if not isinstance(content, list):
        raise DataError(f"{spec}: found a {type(content).__name__}; {form}.")
    items = cast("list[object]", content)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise DataError(f"{spec}, row {index}: found a {type(item).__name__}; {form}.")
    records = cast("Records", items)
    return records, _columns(records)


def _read_csv(path: Path, spec: str) -> Table:
    """Every cell is text: a number keeps its spelling, and a cell with JSON in it is not parsed."""
    reader = csv.reader(io.StringIO(_text(path, spec), newline=""), strict=True)
    records: Records = []
    try:
        header = next(reader, [])
        if len(set(header)) != len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise DataError(f"{spec}: the column '{twice}' appears twice in the header. Rename one.")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{spec}, line {reader.line_num}: found {len(cells)} cells, the header has {len(header)}. "
                    "A cell with a comma or a line break must be in double quotes."
                )
            records.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DataError(
            f"{spec}, line {reader.line_num}: not valid csv: {error}. Mend the line, or save as jsonl."
        ) from None
    return records, header


def _read_parquet(path: Path, spec: str) -> Table:
    try:
        with pq.ParquetFile(path) as file:
            return _records(file.read())
    except pa.ArrowException as error:
        raise DataError(f"{spec}: not a readable parquet file: {error}") from error


def _records(table: Any) -> Table:
    return cast("Records", table.to_pylist()), [str(name) for name in table.column_names]


def _read_datasets_folder(path: Path, spec: str, split: Split) -> Table:
    names = sorted(entry.name for entry in path.iterdir())
    if "state.json" not in names and "dataset_dict.json" not in names:
        raise DataError(
            f"{spec}: this folder was not saved by datasets' save_to_disk (no state.json or "
            f"dataset_dict.json). It holds: {', '.join(names[:20]) or 'nothing'}. Give one file of it."
        )
    # Two seconds of import that a run on any other kind of file need not pay.
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, datasets.DatasetDict):
            loaded = loaded[_choose_split(spec, [str(name) for name in loaded], split)]
        # The arrow format hands over the rows in the data set's own order, without decoding features.
        return _records(loaded.with_format("arrow")[:])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{spec}: not a readable datasets folder: {error}") from error


def _choose_split(spec: str, found: list[str], split: Split) -> str:
    wanted = ("train",) if split == "train" else EVAL_SPLITS
    for name in wanted:
        if name in found:
            return name
    raise DataError(
        f"{spec}: needs a split named {' or '.join(wanted)} for data.{split}_files; found: {', '.join(found)}. "
        f"Give the folder of one split, like {spec.rstrip('/')}/{found[0] if found else 'train'}."
    )


READERS: dict[str, Callable[[Path, str], Table]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
