"""Checkpoint folders that are whole or not there.

Written beside their place, every file fsynced, sizes and sha256 in a manifest that is written last, then one
rename. The newest is chosen by number. A damaged one is named and the one before it is used. What is inside is
the business of snapshot.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from klimb.errors import CheckpointError
from klimb.ranks import ALONE, Ranks

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The number in a finished checkpoint's name; None for temporary and foreign folders."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def listed(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first, by number."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def write(folder: Path, step: int, fill: Callable[[Path], None], ranks: Ranks = ALONE) -> Path:
    """Make checkpoint `step` in `folder`; `fill` writes its files into the given place, every rank its own.

    On an error nothing is left behind and older checkpoints are untouched. Raises CheckpointError when the disk
    refuses.
    """
    final = folder / checkpoint_name(step)
    temporary, aside = folder / f"{final.name}.tmp", folder / f"{final.name}.old.tmp"

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    def end() -> None:
        _seal(temporary)
        if final.exists():  # a damaged one of the same number, or the same state saved again
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        temporary.rename(final)
        _sync(folder)
        shutil.rmtree(aside, ignore_errors=True)

    def undo() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.exists() and not final.exists():
            aside.rename(final)

    try:
        ranks.first(begin)
        fill(temporary)
        ranks.first(end)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        ranks.first(undo)
        kept = [path.name for path in listed(folder)]
        raise CheckpointError(
            f"{final}: the checkpoint could not be written: {error}. "
            f"Checkpoints that stay loadable: {', '.join(kept) or 'none'}. Free some space and run the command again."
        ) from error
    return final


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Leave the newest `keep` and the best one."""
    for path in listed(folder)[:-keep]:
        if step_of(path) != best:
            shutil.rmtree(path)


def set_aside(folder: Path, step: int) -> list[str]:
    """Checkpoints newer than `step` belong to a path not taken; they are renamed, not deleted. What was done, in
    sentences."""
    said: list[str] = []
    for path in reversed(listed(folder)):  # the newest first: what a kill leaves is still a path from the start
        if (step_of(path) or 0) > step:
            names = (path.with_name(f"{path.name}.abandoned-{n}") for n in range(1, 10_000))
            aside = next(name for name in names if not name.exists())
            path.rename(aside)
            said.append(f"{path.name} is newer than the state gone back to; renamed to {aside.name}")
    return said


def clean(folder: Path) -> None:
    """Remove what killed saves left behind; put back one that was moved aside for a save that never came."""
    for path in folder.glob("step-*.old.tmp"):
        final = path.with_name(path.name.removesuffix(".old.tmp"))
        if not final.exists():
            path.rename(final)
    for path in folder.glob("step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file has the size and the sha256 of the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so its save was never finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    for name, (size, digest) in files.items():
        place = path / name
        try:
            if not place.is_file():
                return f"{name} is missing"
            if place.stat().st_size != size:
                return f"{name} has {place.stat().st_size} bytes, {size} were written"
            if _sha256(place) != digest:
                return f"{name} is not what was written (its sha256 differs)"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None if files else f"its {MANIFEST} lists no file"


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a warning for each damaged one above it."""
    warnings: list[str] = []
    for path in reversed(listed(folder)):
        wrong = damage(path)
        if wrong is None:
            return path, warnings
        warnings.append(f"{path} is damaged and not used: {wrong}")
    return None, warnings


def require_whole(path: Path) -> None:
    """Raises CheckpointError, naming what is wrong and the checkpoint to take instead."""
    if not path.is_dir():
        near = [p.name for p in listed(path.parent)]
        raise CheckpointError(f"{path}: no such checkpoint; {path.parent} holds: {', '.join(near) or 'none'}")
    wrong = damage(path)
    if wrong is not None:
        other, _ = newest(path.parent)
        hint = f"; {other} is whole" if other else ""
        raise CheckpointError(f"{path}: the checkpoint is incomplete or damaged: {wrong}{hint}")


def _seal(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "files": {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
        }
    }
    for path in files:
        _sync(path)
    place = folder / MANIFEST
    place.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync(place)
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _sync(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
