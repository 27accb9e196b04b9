"""Where numbers go: metrics.jsonl, samples.jsonl, TensorBoard and, if asked, a tracking service.

The jsonl files are the run's memory: one line per phase, cut back to a checkpoint's byte offsets on resume, so
that a run killed anywhere ends with the same files as one that never stopped.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from klimb.config.schema import LoggingConfig
from klimb.errors import KlimbError, MissingExtra
from klimb.types import Scored

FILES = ("metrics.jsonl", "samples.jsonl")
Row = dict[str, float]
Sink = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its metrics."""


class RunLog:
    """Open for one process's part of a run. writes: False on all ranks but the first, which read only."""

    def __init__(
        self,
        folder: Path,
        config: LoggingConfig,
        name: str,
        hyperparameters: Mapping[str, Any],
        writes: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._config, self._writes = folder, config, writes
        self._name, self._hyperparameters = name, hyperparameters
        self._sinks: list[Sink] = []
        self._closers: list[Callable[[], None]] = []

    def offsets(self) -> dict[str, int]:
        """Bytes in each file now."""
        return {name: self._size(name) for name in FILES}

    def begin(self, offsets: Mapping[str, int], step: int) -> None:
        """Cut the files back to a checkpoint's offsets and open the other places for steps above `step`."""
        if not self._writes:
            return
        for name in FILES:
            place = self._folder / name
            if self._size(name) > offsets.get(name, 0):
                with place.open("r+b") as file:
                    file.truncate(offsets.get(name, 0))
            place.touch()
        if self._config.tensorboard:
            self._open_tensorboard(step)
        for service in (_wandb, _mlflow, _trackio):
            opened = service(self._config, self._name, self._folder, self._hyperparameters)
            if opened is not None:
                self._sinks.append(opened[0])
                self._closers.append(opened[1])

    def set_aside(self, offsets: Mapping[str, int], name: str) -> None:
        """Copy the metrics beyond a checkpoint's offset to metrics.NAME.jsonl."""
        if not self._writes:
            return
        with (self._folder / "metrics.jsonl").open("rb") as file:
            file.seek(offsets.get("metrics.jsonl", 0))
            (self._folder / f"metrics.{name}.jsonl").write_bytes(file.read())

    def rewind(self, offsets: Mapping[str, int], step: int) -> None:
        """Back to a checkpoint in the middle of a run."""
        self.close()
        self.begin(offsets, step)

    def rows(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds now."""
        place = self._folder / "metrics.jsonl"
        return [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()] if place.exists() else []

    def metrics(self, row: Row) -> None:
        """One line; a value that is not finite is written as its name, since JSON has no NaN."""
        self._append("metrics.jsonl", [{k: _plain(v) for k, v in row.items()}])
        numbers = {k: float(v) for k, v in row.items() if k != "step" and math.isfinite(v)}
        for sink in self._sinks:
            sink(int(row["step"]), numbers)

    def samples(self, step: int, scored: Sequence[Scored], kind: str = "train") -> None:
        """Episodes for people to read."""
        self._append("samples.jsonl", [sample_row(step, s, kind) for s in scored])

    def close(self) -> None:
        for close in self._closers:
            close()
        self._closers.clear()
        self._sinks.clear()

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows or not self._writes:
            return
        place = self._folder / name
        try:
            with place.open("a", encoding="utf-8") as file:
                file.write("".join(json_line(row) for row in rows))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise KlimbError(
                f"{place}: cannot be written: {error.strerror}. The run stops here; free some space and run the same "
                "command again, it goes on from the newest checkpoint"
            ) from error

    def _size(self, name: str) -> int:
        place = self._folder / name
        return place.stat().st_size if place.exists() else 0

    def _open_tensorboard(self, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=step + 1 if step else 0)

        def sink(at: int, numbers: Mapping[str, float]) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, at)
            writer.flush()

        self._sinks.append(sink)
        self._closers.append(writer.close)


_UNSAFE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def json_line(row: Mapping[str, Any]) -> str:
    """One line of a jsonl file, readable in any language.

    What a model wrote may hold terminal controls, line separators, direction marks or lone surrogates: JSON allows
    them raw (or breaks on them), so they are written as escapes, which reads back to the same text.
    """
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text) + "\n"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def sample_row(step: int, scored: Scored, kind: str) -> dict[str, Any]:
    sample = scored.sample
    return {
        "step": step,
        "kind": kind,
        "row": sample.prompt.row,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "answer": sample.prompt.answer,
        "reward": _plain(scored.total) if scored.rewards else None,
        "parts": {name: _plain(value) for name, value in scored.parts.items()},
        "correct": scored.correct,
        "failure": scored.failure,
        "finish_reason": sample.finish_reason,
        "num_tokens": sample.num_response_tokens,
    }


Opened = tuple[Sink, Callable[[], None]] | None


def _wandb(config: LoggingConfig, name: str, folder: Path, values: Mapping[str, Any]) -> Opened:
    if config.wandb is None:
        return None
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra("wandb", "wandb", "logging.wandb") from None
    run: Any = wandb.init(
        project=config.wandb, name=name, id=name, dir=str(folder), config=dict(values), resume="allow"
    )

    def sink(step: int, numbers: Mapping[str, float]) -> None:
        run.log(dict(numbers), step=step)

    return sink, run.finish


def _mlflow(config: LoggingConfig, name: str, folder: Path, values: Mapping[str, Any]) -> Opened:
    if config.mlflow is None:
        return None
    try:
        import mlflow  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra("mlflow", "mlflow", "logging.mlflow") from None
    client: Any = mlflow
    client.set_experiment(config.mlflow)
    client.start_run(run_name=name)
    client.log_dict(dict(values), "config.json")
    return lambda step, numbers: client.log_metrics(dict(numbers), step=step), client.end_run


def _trackio(config: LoggingConfig, name: str, folder: Path, values: Mapping[str, Any]) -> Opened:
    if config.trackio is None:
        return None
    try:
        import trackio  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra("trackio", "trackio", "logging.trackio") from None
    client: Any = trackio
    client.init(project=config.trackio, name=name, config=dict(values), resume="allow")
    return lambda step, numbers: client.log(dict(numbers), step=step), client.finish
