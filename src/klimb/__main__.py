"""`python -m klimb` is the `klimb` command."""

from klimb.cli import main

main()
