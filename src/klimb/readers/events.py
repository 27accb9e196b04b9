"""TensorBoard event files, one record at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from klimb.errors import DataError
from klimb.readers.columns import Columns
from klimb.readers.files import Sheet

PATTERN = "*events.out.tfevents*"
FRAME = 16
"""Bytes around each record: its length and two checksums."""


def event_files(folder: Path) -> list[Path]:
    """In the order in which they were begun: the name holds the second."""
    return sorted((path for path in folder.rglob(PATTERN) if path.is_file()), key=lambda path: path.name)


def read_events(files: list[Path]) -> Sheet:
    """All scalars of the files. Files in several folders are one run when each goes on where the one before stopped
    (transformers opens a folder at every start); DataError when two begin at the beginning."""
    sheet, folders = Sheet(), dict[Path, Columns]()
    for path in files:
        columns = folders.setdefault(path.parent, Columns())
        _read(path, columns, sheet)
    parts = {folder: columns for folder, columns in folders.items() if columns.names}
    begins = min((columns.first for columns in parts.values()), default=0)
    first = [folder for folder, columns in parts.items() if columns.first <= begins]
    if len(first) > 1:
        shown = ", ".join(str(folder) for folder in first[:8])
        more = ", ..." if len(first) > 8 else ""
        raise DataError(f"{len(first)} runs, each from its beginning: {shown}{more}. Give one of them")
    for columns in parts.values():
        sheet.named.append(columns)
    return sheet


def _read(path: Path, columns: Columns, sheet: Sheet) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    read = records = 0
    why = ""
    try:
        for record in RawEventFileLoader(str(path)).Load():
            event: Any = cast(Any, event_pb2).Event.FromString(record)
            read, records = read + len(record) + FRAME, records + 1
            for value in event.summary.value:
                found = _scalar(value)
                if found is not None:
                    columns.put(value.tag, int(event.step), found)
    except Exception as error:  # tensorboard raises its own and protobuf's, which share no base
        why = f" ({type(error).__name__})"
    # The loader ends without a word at a record whose checksum is wrong.
    if read < path.stat().st_size:
        after = f"after {records:,} records{why}"
        sheet.notes.append(f"{path.name}: damaged or cut off {after}; what stands before was read")


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "tensor" and not value.tensor.tensor_shape.dim:
        tensor = value.tensor
        for numbers in (tensor.float_val, tensor.double_val, tensor.int_val, tensor.int64_val):
            if len(numbers) == 1:
                return float(numbers[0])
    return None
