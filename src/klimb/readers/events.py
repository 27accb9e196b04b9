"""TensorBoard event files, one record at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from klimb.errors import DataError
from klimb.readers.columns import Columns
from klimb.readers.files import Problems

PATTERN = "*events.out.tfevents*"


def event_files(folder: Path) -> list[Path]:
    """In the order in which they were begun: the name holds the second."""
    return sorted(path for path in folder.rglob(PATTERN) if path.is_file())


def read_events(files: list[Path], columns: Columns) -> Problems:
    """All scalars of the files; a file that is cut off gives what stands before the cut."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    problems = Problems()
    for path in files:
        try:
            for record in RawEventFileLoader(str(path)).Load():
                event: Any = cast(Any, event_pb2).Event.FromString(record)
                for value in event.summary.value:
                    found = _scalar(value)
                    if found is not None:
                        columns.put(value.tag, int(event.step), found)
        except Exception as error:  # tensorboard raises its own and protobuf's, which share no base
            problems.notes.append(
                f"{path.name}: damaged from some record on ({type(error).__name__}); what stands before was read"
            )
    if not files:
        raise DataError("no event file")
    return problems


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
