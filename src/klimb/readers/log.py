"""A path to a log: what is there, who wrote it, and the table it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from klimb.doctor.finding import Facts
from klimb.doctor.table import Table
from klimb.errors import DataError, KlimbError
from klimb.readers.columns import Mapped
from klimb.readers.events import event_files, read_events
from klimb.readers.files import Sheet, read_csv, read_json, read_jsonl
from klimb.readers.names import FRAMEWORKS
from klimb.report.files import RunFiles, read_run

FORMS = (
    "a klimb run folder, TensorBoard event files, a trainer_state.json (TRL, transformers), or metrics as .jsonl, "
    ".json or .csv (verl, OpenRLHF, W&B)"
)


@dataclass(frozen=True, kw_only=True)
class Log:
    """table of the series with a counterpart here; mapping: their names to ours; unmapped: names without one."""

    path: Path
    source: str
    table: Table
    facts: Facts
    mapping: dict[str, str]
    unmapped: tuple[str, ...]
    notes: tuple[str, ...]


def read_log(path: Path, source: str | None = None) -> Log:
    """source: the framework, None to tell it from the names. Raises DataError for what is no log."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; needed: {FORMS}")
    if path.is_dir():
        return _folder(path, source)
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; needed: {FORMS}")
    if path.name == "samples.jsonl" and (path.parent / "config.yaml").is_file():
        raise DataError(f"{path}: the answers of a run, not its metrics; give the run folder, {path.parent}")
    if "tfevents" in path.name:
        sheet = read_events([path])
    elif path.suffix in (".jsonl", ".ndjson", ".log"):
        sheet = read_jsonl(path)
    elif path.suffix == ".json":
        sheet = read_json(path)
    elif path.suffix in (".csv", ".tsv"):
        sheet = read_csv(path)
    else:
        raise DataError(f"{path}: its name ends in {path.suffix or 'nothing'}; needed: {FORMS}")
    return _log(path, sheet, source)


def _folder(path: Path, source: str | None) -> Log:
    run = _run(path) if source in (None, "klimb") else None
    if run is not None:
        return _of_run(run)
    state = _newest_state(path)
    if state is not None:
        return _log(state, read_json(state), source)
    events = event_files(path)
    if events:
        return _log(path, read_events(events), source)
    for name in ("metrics.jsonl", "metrics.csv"):
        if (path / name).is_file():
            return read_log(path / name, source)
    inside = sorted(p.name for p in path.iterdir())[:8]
    raise DataError(f"{path}: no log in it (it holds: {', '.join(inside) or 'nothing'}); needed: {FORMS}")


def _run(path: Path) -> RunFiles | None:
    """A klimb run folder: other frameworks too write a config.yaml, but not this one."""
    if not (path / "metrics.jsonl").is_file() or not (path / "config.yaml").is_file():
        return None
    run = read_run(path, samples=False)
    section = run.config.get("actor_rollout_ref")
    return run if isinstance(section, dict) and "model_path" in section else None


def _newest_state(path: Path) -> Path | None:
    """transformers writes its state beside the finished model, and into each checkpoint on the way."""
    if (path / "trainer_state.json").is_file():
        return path / "trainer_state.json"

    def steps(state: Path) -> int:
        word = state.parent.name.rpartition("-")[2]
        return int(word) if word.isascii() and word.isdecimal() else -1

    return max((p for p in path.glob("checkpoint-*/trainer_state.json") if p.is_file()), key=steps, default=None)


def _of_run(run: RunFiles) -> Log:
    if not any(row["step"] > 0 for row in run.rows):
        why = f" ({'; '.join(run.notes)})" if run.notes else ""
        raise DataError(f"{run.folder}: a klimb run without a finished step{why}; nothing to look at")
    return Log(
        path=run.folder,
        source="klimb",
        table=Table.of(run.rows),
        facts=Facts.of(run.settings),
        mapping={},
        unmapped=(),
        notes=tuple(run.notes),
    )


def _log(path: Path, sheet: Sheet, source: str | None) -> Log:
    columns, sentences = sheet.columns(), sheet.sentences(path.name)
    mapped: Mapped = columns.mapped(source)
    if not columns.names:
        why = f" ({'; '.join(sentences)})" if sentences else ""
        raise DataError(f"{path}: no number in it{why}; needed: {FORMS}")
    if mapped.framework is None or not mapped.mapping:
        shown = ", ".join(columns.names[:12])
        known = f"the names of {source}" if source else f"names of {', '.join(FRAMEWORKS)}"
        raise DataError(
            f"{path}: none of its {len(columns.names)} series is known by {known}. Found: {shown}. Rename columns to "
            "those of one framework (docs/doctor.md lists them), or name the framework with --source"
        )
    return Log(
        path=path,
        source=mapped.framework,
        table=mapped.table,
        facts=replace(Facts(), source=mapped.framework),
        mapping=mapped.mapping,
        unmapped=mapped.unmapped,
        notes=(*sentences, *mapped.notes),
    )


def require_log(path: Path, source: str | None) -> Log:
    """As `read_log`; what the system refuses is said in the same way."""
    try:
        return read_log(path, source)
    except OSError as error:
        raise KlimbError(f"{path}: cannot be read: {error.strerror}") from error
