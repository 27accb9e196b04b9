"""Ctrl-C and SIGTERM: a run ends between two turns, never inside one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STOPPING = b"\nstopping after this step; once more to stop at once\n"


@dataclass
class Interrupt:
    """Ctrl-C or SIGTERM: the first lets the turn end and saves, the second stops at once. file: where another process
    listens for this one, it is there from the first on."""

    file: Path | None = None
    _heard: bool = False

    @property
    def asked(self) -> bool:
        return self._heard if self.file is None else self.file.exists()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            raise KeyboardInterrupt
        self._heard = True
        # Plain write: a signal may fall into the middle of somebody else's print.
        os.write(2, STOPPING)

    def listening(self) -> AbstractContextManager[None]:
        return handling(self) if self.file is None else nullcontext()


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Ctrl-C and SIGTERM go to the handler. Nothing changes outside the main thread: Python hands signals to that one
    alone, and whoever owns it decides there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
