"""A run folder as it is: finished, still written, stopped in the middle of a line, or empty."""

from __future__ import annotations

import copy
import fcntl
import json
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from klimb import checkpoint
from klimb.config.load import put_override
from klimb.console import plain
from klimb.errors import ConfigError, KlimbError
from klimb.report.lines import Lines, number, read_samples, whole

PARTS = ("config.yaml", "metrics.jsonl", "samples.jsonl")
"""A folder with none of these is no run folder."""
State = Literal["finished", "running", "stopped", "ended", "empty"]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """rows: one per step, values that are not finite included; samples: those a report shows.

    config_text: config.yaml as it stands; best: step and value of the best checkpoint so far, and whether it is still
    there; notes: what could not be read, in sentences.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    config_text: str
    rows: list[dict[str, float]]
    samples: list[dict[str, Any]]
    interventions: list[dict[str, Any]]
    best: tuple[int, float, bool] | None
    state: State
    notes: list[str]

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as it stood at the end: with what the guard changed."""
        out = copy.deepcopy(self.config)
        for row in self.interventions:
            overrides = row.get("overrides")
            for override in overrides if isinstance(overrides, list) else ():
                with suppress(ConfigError):  # a damaged record changes nothing
                    put_override(out, str(override))
        return out


def read_run(folder: Path, samples: bool = True) -> RunFiles:
    """Read what is there; samples: those too. Raises KlimbError for a folder that holds no run."""
    _check(folder)
    notes: list[str] = []
    config, text = _read_config(folder / "config.yaml", notes)
    rows = _read_rows(folder / "metrics.jsonl", notes)
    shown, sample_notes = read_samples(folder / "samples.jsonl") if samples else ([], [])
    lines = Lines(folder / "interventions.jsonl")
    interventions = [row for _, row in lines.objects() if whole(row.get("step")) is not None]
    notes += sample_notes + lines.notes
    run = config.get("run")
    name = run.get("name") if isinstance(run, dict) else None
    return RunFiles(
        folder=folder,
        name=plain(str(name or folder.resolve().name)),
        config=config,
        config_text=text,
        rows=rows,
        samples=shown,
        interventions=interventions,
        best=_read_best(folder / "checkpoints"),
        state=_state(folder, config, rows),
        notes=notes,
    )


def fingerprint(folder: Path) -> tuple[tuple[int, int] | None, ...]:
    """Changes whenever one of the files a report shows has changed, and with the lock."""
    out: list[tuple[int, int] | None] = [(int(held(folder)), 0)]
    for name in (*PARTS, "interventions.jsonl", "checkpoints"):
        try:
            found = (folder / name).stat()
        except OSError:
            out.append(None)
        else:
            out.append((found.st_size, found.st_mtime_ns))
    return tuple(out)


def held(folder: Path) -> bool:
    """Whether a process trains in the folder: `klimb train` locks it exclusively for as long as it lives."""
    try:
        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go when the file is closed, at once
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _check(folder: Path) -> None:
    if not folder.exists():
        raise KlimbError(f"{folder}: no such run folder")
    if not folder.is_dir():
        raise KlimbError(f"{folder}: a file; give the run folder, which holds config.yaml and metrics.jsonl")
    if any((folder / name).is_file() for name in PARTS):
        return
    inside = sorted(p.name for p in folder.iterdir() if (p / "metrics.jsonl").is_file())
    hint = f". Run folders inside it: {', '.join(inside[:8])}{', ...' if len(inside) > 8 else ''}" if inside else ""
    raise KlimbError(f"{folder}: not a run folder: no {', '.join(PARTS[:-1])} or {PARTS[-1]} there{hint}")


def _read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        notes.append("config.yaml: missing, so target, posture and length of the run are not known")
        return {}, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        notes.append("config.yaml: not readable as YAML, so target, posture and length of the run are not known")
        return {}, text
    return found, text


def _read_rows(path: Path, notes: list[str]) -> list[dict[str, float]]:
    lines = Lines(path)
    rows: list[dict[str, float]] = []
    for _, found in lines.objects():
        if whole(found.get("step")) is None:
            lines.damaged += 1
            continue
        values = ((sys.intern(key), number(value)) for key, value in found.items())
        rows.append({key: value for key, value in values if value is not None})
    notes += lines.notes
    return sorted(rows, key=lambda row: row["step"])


def _state(folder: Path, config: dict[str, Any], rows: list[dict[str, float]]) -> State:
    if held(folder):
        return "running"
    if not rows:
        return "empty"
    reached = _reached_end(config, rows[-1])
    if reached is None:
        return "ended"
    return "finished" if reached else "stopped"


def _reached_end(config: dict[str, Any], last: dict[str, float]) -> bool | None:
    """None where the config does not say how long the run was to be."""
    training = config.get("training")
    wanted = training if isinstance(training, dict) else {}
    pairs = (("total_episodes", "episodes"), ("total_epochs", "epoch"))
    ends = [(end, last.get(name, 0)) for key, name in pairs if (end := number(wanted.get(key))) is not None]
    return any(reached >= end for end, reached in ends) if ends else None


def _read_best(folder: Path) -> tuple[int, float, bool] | None:
    """From the newest checkpoint whose state can be read."""
    for path in reversed(checkpoint.listed(folder)):
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))["state"]
            step, value = whole(state["best_step"]), number(state["best_value"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if step is None or value is None or not math.isfinite(value):
            return None
        return step, value, (folder / checkpoint.checkpoint_name(step)).is_dir()
    return None
