"""Ctrl-C and SIGTERM: a run ends between two turns, never inside one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Ctrl-C or SIGTERM: the first lets the turn end and saves, the second stops at once. quiet: says nothing."""

    asked: bool = False
    quiet: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # Plain write: a signal may fall into the middle of somebody else's print.
        if not self.quiet:
            os.write(2, b"\nstopping after this step; once more to stop at once\n")

    @contextmanager
    def listening(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python hands signals to the main thread alone; whoever owns that one decides there
            return
        before = {s: signal.signal(s, self) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
