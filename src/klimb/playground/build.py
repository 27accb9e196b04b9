"""Build the playground into a folder, whole or not at all.

FOLDER/sft/              tokenizer and causal language model
FOLDER/reward_model/     tokenizer and sequence classifier with one output
FOLDER/playground.json   version, fingerprint of the settings, what was measured, seconds a stage
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging

from klimb.errors import ModelError
from klimb.playground.measure import measure
from klimb.playground.progress import Report, console_report
from klimb.playground.reward_model import train_reward_model
from klimb.playground.settings import TAUGHT, VERSION, PlaygroundSettings, fingerprint
from klimb.playground.sft import train_sft
from klimb.playground.tokenizer import train_tokenizer

ABOUT = "playground.json"
LEFTOVER_SECONDS = 3_600.0
TOKENIZER_ROWS = 2_000


def is_current(folder: Path, settings: PlaygroundSettings | None = None) -> bool:
    """Whether folder holds a playground that was built with these settings by this version."""
    about = _read_about(folder)
    return about is not None and about.get("fingerprint") == fingerprint(settings or PlaygroundSettings())


def build_playground(
    folder: Path, *, progress: Report | None = None, settings: PlaygroundSettings | None = None
) -> None:
    """Train tokenizer, SFT model and reward model, measure them, and put them at `folder`, replacing a playground.

    progress: where to report to; None: a bar and the measured numbers on standard output. All is written beside and
    renamed at the end. torch's random state is as before afterwards. Raises ModelError when `folder` exists and is
    not a playground.
    """
    if progress is None:
        console = Console(highlight=False, markup=False)
        with console_report(console) as bars:
            build_playground(folder, progress=bars, settings=settings)
        for line in describe(read_about(folder)):
            console.print(line)
        return
    settings = settings or PlaygroundSettings()
    folder = folder.absolute()
    if folder.exists() and _read_about(folder) is None:
        raise ModelError(
            f"{folder} exists and is no playground: it has no readable {ABOUT}. Nothing was written. "
            "Remove it, or choose another folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    beside = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
    try:
        with torch.random.fork_rng(devices=[]), _no_bars():
            about = _build(beside, settings, progress)
        (beside / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        beside.chmod(0o755)
        if folder.exists():
            folder.rename(Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent)) / "stale")
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    for stale in folder.parent.glob(f"{_prefix(folder)}*/stale"):
        shutil.rmtree(stale.parent, ignore_errors=True)


@contextmanager
def _no_bars() -> Generator[None]:
    """transformers' own bars for single files are off inside, and as they were afterwards."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def _build(folder: Path, settings: PlaygroundSettings, report: Report) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    started = time.monotonic()

    def lap(stage: str) -> None:
        seconds[stage] = round(time.monotonic() - started - sum(seconds.values()), 1)

    report("tokenizer", 0, 1)
    rng = Random(f"playground tokenizer {settings.seed}")
    rows = [(task, row) for task in TAUGHT for row in task.rows("train", TOKENIZER_ROWS)]
    texts = [text for task, row in rows for text in (row.prompt, task.demonstration(row, rng))]
    train_tokenizer(texts, settings.vocab_size, folder / "sft")
    tokenizer = AutoTokenizer.from_pretrained(folder / "sft")
    report("tokenizer", 1, 1, f"{len(tokenizer)} tokens")
    lap("tokenizer")
    sft = train_sft(tokenizer, settings, folder / "sft", report)
    lap("sft")
    reward_model = train_reward_model(tokenizer, sft, settings, folder / "reward_model", report)
    lap("reward_model")
    measured = measure(tokenizer, sft, reward_model, settings, report)
    lap("measuring")
    return {
        "version": VERSION,
        "fingerprint": fingerprint(settings),
        "settings": asdict(settings),
        "vocabulary": len(tokenizer),
        "parameters": sum(p.numel() for p in sft.parameters()),
        "measured": measured,
        "seconds": seconds,
    }


def describe(about: dict[str, Any]) -> list[str]:
    """What was measured, one line a task and one for the reward model."""
    measured = about["measured"]
    lines: list[str] = []
    for task in TAUGHT:
        m = measured[task.name]
        auc = "-" if m["reward_model_auc"] is None else f"{m['reward_model_auc']:.3f}"
        lines.append(
            f"{task.name}: right {m['sampled_correct']:.1%} sampled, {m['greedy_correct']:.1%} greedy, "
            f"{m['mean_response_tokens']:.0f} tokens a response, reward model AUC {auc}"
        )
    return [*lines, f"reward model: {measured['reward_model_pair_accuracy']:.1%} of held-out pairs in order"]


def read_about(folder: Path) -> dict[str, Any]:
    """The content of a playground's playground.json. ModelError when there is none."""
    about = _read_about(folder)
    if about is None:
        raise ModelError(f"{folder} is no playground: no readable {ABOUT}. Build one with: klimb prepare playground")
    return about


def _read_about(folder: Path) -> dict[str, Any] | None:
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def _prefix(folder: Path) -> str:
    return f".{folder.name}.building-"


def _remove_leftovers(folder: Path) -> None:
    """What builds that were killed left beside; a build that may still run is younger and stays."""
    for leftover in folder.parent.glob(f"{_prefix(folder)}*"):
        if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
