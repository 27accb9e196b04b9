"""`klimb compare`: the words of the command line, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from klimb.cli.plan import open_console
from klimb.comparison.arms import by_value
from klimb.comparison.compare import Comparison, Wish, compare, compare_runs
from klimb.config.load import parse_vary
from klimb.console import plain
from klimb.errors import ConfigError


def run_and_show(
    words: Sequence[str],
    vary: Sequence[str],
    every: int | None,
    seeds: int | None,
    steps: int | None,
    with_advice: bool,
    out: Path | None,
) -> bool:
    """Run or read, print, and write the files. Whether it is finished."""
    wish = Wish(
        vary=tuple(parse_vary(text) for text in vary), every=every, seeds=seeds, steps=steps, with_advice=with_advice
    )
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    targets = [Path(word) for word in words if word not in overrides]
    console = open_console()
    if not targets:
        raise ConfigError("give a config file to run, or two or more run folders")
    if all(target.is_dir() for target in targets):
        _refuse(overrides=bool(overrides), vary=bool(vary), seeds=seeds is not None, steps=steps is not None)
        done = compare_runs(targets, out, wish)
    elif len(targets) == 1:
        if out is not None:
            raise ConfigError(
                "--out goes with run folders; a comparison of a config has a folder of its own (run.dir, run.name)"
            )
        done = compare(targets[0], overrides, wish, lambda text: console.print(Text(plain(text)), soft_wrap=True))
    else:
        wrong = next(target for target in targets if not target.is_dir())
        raise ConfigError(f"{wrong}: not a run folder; give one config file, or two or more run folders")
    show(done)
    return done.finished


def _refuse(**given: bool) -> None:
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise ConfigError(f"{names[0]}: goes with a config file; run folders are compared as they are")


def show(done: Comparison) -> None:
    console = open_console()
    head, *body = done.cells()
    shown = Table(*head, box=None)
    for cells in body:
        shown.add_row(*(Text(cell, justify="right") for cell in cells))
    seeds = max(len(arm.runs) for arm in done.arms)
    spread = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
    console.print()
    console.print(shown)
    console.print(Text(f"KL: nats per token (k3); rows are means of the 20 steps before{spread}", style="dim"))
    for key, values in done.implied.items():
        console.print(Text(plain(f"  {key}: {by_value(values)}")), soft_wrap=True)
    console.print()
    for sentence in done.sentences:
        console.print(Text(plain(f"- {sentence}")), soft_wrap=True)
    for name in ("compare.csv", "compare.png", "compare.html"):
        console.print(Text(f"wrote {done.folder / name}"), soft_wrap=True)
    if not done.finished:
        console.print(Text("stopped early; the same command goes on from there"))
