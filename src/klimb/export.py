"""A checkpoint's policy as a plain Hugging Face folder, and how checkpoints are named on the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.text import Text

from klimb import checkpoint
from klimb.errors import CheckpointError, ConfigError


def find_checkpoint(run: Path, which: str) -> Path:
    """`last`, `best` or a step number of a run folder, checked against its manifest."""
    folder = run / "checkpoints"
    there = checkpoint.listed(folder)
    if not there:
        raise CheckpointError(f"{run}: no checkpoint there; a run folder has them in {folder}")
    if which == "last":
        path, warnings = checkpoint.newest(folder)
        for text in warnings:
            Console(stderr=True).print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
        if path is None:
            raise CheckpointError(f"{folder}: every checkpoint is damaged")
        return path
    if which == "best":
        from klimb.snapshot import read_record

        best = read_record(find_checkpoint(run, "last"))["state"]["best_step"]
        if best is None:
            raise CheckpointError(f"{run}: no evaluation has been made, so no checkpoint is the best; take last")
        which = str(best)
    if not which.isdecimal():
        names = ", ".join(str(checkpoint.step_of(p)) for p in there)
        raise ConfigError(f"--checkpoint is '{which}'; allowed: last, best, or a step among {names}")
    path = folder / checkpoint.checkpoint_name(int(which))
    checkpoint.require_whole(path)
    return path


def export_policy(run: Path, which: str, target: Path, dtype: str) -> Path:
    """Write the policy to `target`, which must not exist; bfloat16 halves it. Returns the folder."""
    if target.exists():
        raise ConfigError(f"--to {target}: it exists; give a folder that does not, nothing is overwritten")
    source = find_checkpoint(run, which) / "actor"
    partial = target.with_name(target.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if dtype == "float32":
            shutil.copytree(source, partial)
        else:
            _convert(source, partial)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"--to {target}: cannot be written: {error}") from None
    return target


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, local_files_only=True)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(target)
