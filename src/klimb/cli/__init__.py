"""The `klimb` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import sys

from klimb.cli.commands import cli
from klimb.errors import KlimbError

__all__ = ["main"]


def main() -> None:
    """Exit 0 done, 2 the user's mistake (one message, no traceback), 1 our fault, 130 interrupted."""
    import click

    try:
        code = cli.main(prog_name="klimb", standalone_mode=False)
    except KlimbError as error:
        from klimb.console import plain

        click.echo(f"klimb: {plain(str(error))}", err=True)  # a message may quote a row or an answer
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("klimb: stopped at once; the state since the last checkpoint is lost", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
