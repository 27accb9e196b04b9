"""A small tokenizer, SFT model and reward model for the built-in tasks, made offline in about two minutes."""

from klimb.playground.build import build_playground, describe, is_current, read_about
from klimb.playground.progress import console_report, silent
from klimb.playground.settings import PlaygroundSettings

__all__ = [
    "PlaygroundSettings",
    "build_playground",
    "console_report",
    "describe",
    "is_current",
    "read_about",
    "silent",
]
