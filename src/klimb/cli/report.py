"""`klimb report`: a run folder as a page and a picture, or served while it grows."""

from __future__ import annotations

import signal
from pathlib import Path

from rich.text import Text

from klimb.cli.plan import open_console
from klimb.console import plain
from klimb.errors import ConfigError, KlimbError
from klimb.report.files import RunFiles, read_run
from klimb.report.overview import STATES
from klimb.report.page import build_page
from klimb.report.picture import write_picture
from klimb.report.serve import Server


def write_and_show(folder: Path, out: Path | None) -> None:
    """Write the HTML and the PNG beside it; print what was found and where they are."""
    target = out or folder / "report.html"
    if target.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {target}: must end in .html; the picture gets the same name with .png")
    run, picture = read_run(folder), target.with_suffix(".png")
    page = build_page(run)
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise KlimbError(f"{target}: cannot be written: {error.strerror}; --out writes elsewhere") from error
    write_picture(run, picture)
    console = open_console()
    for text in found(run):
        console.print(Text(plain(text)), soft_wrap=True)
    for path in (target, picture):
        console.print(Text(plain(f"wrote {path}")), soft_wrap=True)


def found(run: RunFiles) -> list[str]:
    """What the folder holds, and what of it could not be read."""
    steps = int(run.rows[-1]["step"]) if run.rows else 0
    first = f"{run.name}: {STATES[run.state]}; steps {steps:,}, samples {len(run.samples):,}"
    return [first, *(f"note: {note}" for note in run.notes)]


def serve(folder: Path, port: int) -> None:
    """Until somebody presses Ctrl-C."""
    console = open_console()
    # A shell that starts it in the background has it ignore Ctrl-C's signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Server(folder, port) as server:
        console.print(Text(plain(f"{folder}: follow it at {server.address}  (Ctrl-C ends)")), soft_wrap=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            console.print("stopped serving; the run itself goes on")
