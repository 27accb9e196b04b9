"""What is not at work waits in the host's memory: models between their passes, optimizer states between steps.

Moving changes no number. Host memory is not pinned, so a move runs at the speed of ordinary pages.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

HOST = torch.device("cpu")


@contextmanager
def at_work(module: nn.Module | None, place: torch.device | None) -> Generator[None]:
    """Inside, the module is at `place`; afterwards it waits in the host's memory. place None: it stays where it is."""
    if module is None or place is None:
        yield
        return
    module.to(place)
    try:
        yield
    finally:
        module.to(HOST)


@contextmanager
def states_at_work(optimizer: Optimizer, waiting: bool) -> Generator[None]:
    """Inside, an optimizer's states are where their parameters are; afterwards they wait in the host's memory. waiting
    False: they stay where they are."""
    if not waiting:
        yield
        return
    for parameter, state in optimizer.state.items():
        _move(state, parameter.device)
    try:
        yield
    finally:
        park_states(optimizer)


def park_states(optimizer: Optimizer) -> None:
    """Let an optimizer's states wait in the host's memory."""
    move_states(optimizer, HOST)


def move_states(optimizer: Optimizer, place: torch.device) -> None:
    """Let an optimizer's states stay at `place`, wherever their parameters are."""
    for state in optimizer.state.values():
        _move(state, place)


def _move(state: dict[str, object], place: torch.device) -> None:
    state |= {name: value.to(place) for name, value in state.items() if isinstance(value, Tensor)}
