"""Seconds and peak memory by part of a turn, and the rates they make."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from klimb import host
from klimb.malloc import give_back, is_exhausted

RESET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
WATCHED = ("rollout", "score", "update")
"""Parts whose peak memory is logged."""
EVERY = 5
"""On a CPU peaks are measured in a process's first two steps and in every fifth: giving memory back before each part,
which is what tells their peaks apart, costs about 4% of a step (docs/performance.md)."""


class Exhausted(Exception):
    """Memory ran out in a part of a turn. peaks: bytes by part, that one included."""

    def __init__(self, part: str, peaks: Mapping[str, int]) -> None:
        super().__init__(part)
        self.part, self.peaks = part, peaks


@dataclass
class Clock:
    """Seconds and bytes by part of a turn. device: whose memory is looked at; say: told of each part as it begins;
    measures: whether peaks are taken."""

    device: torch.device
    say: Callable[[str], None] | None = None
    measures: bool = True
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    peaks: dict[str, int] = field(default_factory=dict[str, int])

    @contextmanager
    def __call__(self, part: str) -> Generator[None]:
        if self.measures:
            reset_peak(self.device)
        if self.say is not None:
            self.say(part)
        start = time.perf_counter()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_exhausted(error):
                raise
            raise Exhausted(part, self.peaks | {part: peak_bytes(self.device)}) from error
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels still running belong to this part
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
        if self.measures:
            self.peaks[part] = max(self.peaks.get(part, 0), peak_bytes(self.device))

    def metrics(self, tokens: dict[str, int] | None = None, episodes: int = 0) -> dict[str, float]:
        """time/* in seconds; perf/* per second; memory/*_peak in bytes. tokens: how many each part worked on."""
        total = sum(self.seconds.values())
        out = {f"time/{part}": seconds for part, seconds in self.seconds.items()} | {"time/step": total}
        out |= {"memory/limit": float(limit)} if (limit := memory_limit(self.device)) is not None else {}
        out |= {f"memory/{part}_peak": float(self.peaks[part]) for part in WATCHED if part in self.peaks}
        for part, count in (tokens or {}).items():
            out[f"perf/{part}_tokens_per_s"] = count / max(self.seconds[part], 1e-9)
        work = total - self.seconds.get("eval", 0.0)
        return out | ({"perf/episodes_per_s": episodes / max(work, 1e-9)} if episodes else {})


def measures_peaks(device: torch.device, step: int, start: int) -> bool:
    """Whether this step's peaks are worth their cost: always on a GPU. start: steps that were done before this process;
    its second step has the optimizer's state."""
    return device.type == "cuda" or step <= start + 2 or step % EVERY == 0


def reset_peak(device: torch.device) -> None:
    """Let the peak start anew: the allocator's on a GPU, the kernel's high-water mark of this process on Linux, after
    what an earlier part freed has gone back."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back()
    try:
        RESET.write_text("5")
    except OSError:
        return  # elsewhere, or in a closed container: peak_bytes then speaks of the process's whole life


def memory_limit(device: torch.device) -> int | None:
    """Bytes that the device has, or that this container may use of the host's; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host.memory()


def peak_bytes(device: torch.device) -> int:
    """Largest memory since the last `reset_peak`: allocated on the GPU, resident of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
