"""`klimb compare`: the words of the command line, and the table on the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from klimb.cli.plan import open_console
from klimb.comparison.compare import Wish, compare, compare_runs
from klimb.comparison.side_by_side import Comparison
from klimb.config.load import parse_vary
from klimb.console import plain
from klimb.errors import ConfigError

OVERRIDE = re.compile(r"\w+(?:\.\w+)+=")


def run_and_show(words: Sequence[str], vary: Sequence[str], wish: Wish, out: Path | None) -> bool:
    """Run or read, print, and write the files. Whether it is finished."""
    wish = replace(wish, vary=tuple(parse_vary(text) for text in vary))
    overrides = [word for word in words if OVERRIDE.match(word)]
    targets = [Path(word) for word in words if not OVERRIDE.match(word)]
    console = open_console()
    if not targets:
        raise ConfigError("give a config file to run, or two or more run folders")
    if all(target.is_dir() for target in targets):
        given = {"--vary": wish.vary, "--seeds": wish.seeds, "--steps": wish.steps, "an override": overrides}
        for name in (name for name, value in given.items() if value):
            raise ConfigError(f"{name} goes with a config file; run folders are compared as they are")
        done = compare_runs(targets, out, wish)
    elif len(targets) > 1:
        wrong = next(target for target in targets if not target.is_dir())
        raise ConfigError(f"{wrong}: not a run folder; give one config file, or two or more run folders")
    elif out is not None:
        raise ConfigError(
            "--out goes with run folders; a comparison of a config has a folder of its own (run.dir, run.name)"
        )
    else:
        done = compare(targets[0], overrides, wish, lambda text: console.print(Text(plain(text)), soft_wrap=True))
    if done is None:
        console.print("no run has made a step yet; the same command goes on from there")
        return False
    show(done)
    return done.finished or len(targets) > 1


def show(done: Comparison) -> None:
    console = open_console()
    head, *body = done.cells()
    shown = Table(*(Column(Text(plain(cell))) for cell in head), box=None)
    for cells in body:
        shown.add_row(*(Text(cell, justify="right") for cell in cells))
    console.print()
    console.print(shown)
    console.print(Text(done.caption(), style="dim"), soft_wrap=True)
    for line in done.implied:
        console.print(Text(plain(f"  {line}")), soft_wrap=True)
    console.print()
    for sentence in done.sentences:
        console.print(Text(plain(f"- {sentence}")), soft_wrap=True)
    for note in done.notes:
        console.print(Text(plain(f"note: {note}"), style="yellow"), soft_wrap=True)
    for name in ("compare.csv", "compare.png", "compare.html"):
        console.print(Text(plain(f"wrote {done.folder / name}")), soft_wrap=True)
    if not done.finished:
        console.print("not all runs are finished; the command that ran them goes on from there")
