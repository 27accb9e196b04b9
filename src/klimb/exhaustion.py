"""When memory runs out: which phase, the measured peaks, and what to change, in order.

An allocator that refuses is caught while the process lives. A process that the kernel kills says nothing, so each
phase is written down as it begins, and the next start reads what was written last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klimb.doctor.finding import Facts, Remedy
from klimb.doctor.remedies import memory_remedies
from klimb.errors import KlimbError
from klimb.estimate.memory import Peak
from klimb.estimate.show import memory_lines

COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))
"""Where Linux counts the processes that it killed for want of memory: of the machine, of this container."""
NAME = ".phase.json"


class OutOfMemory(KlimbError):
    """The device's or the host's memory did not suffice; the message names the phase, the peaks and the remedies."""


def explain(
    part: str, peaks: Mapping[str, float], limit: float | None, facts: Facts, expected: Sequence[Peak] = ()
) -> str:
    """peaks: bytes by phase, as measured; limit: bytes of the device; expected: what `klimb plan` says of the run."""
    lines = [f"memory ran out in the phase '{part}'"]
    if limit is not None:
        lines[0] += f" (there are {limit / 2**30:.3g} GiB)"
    if peaks:
        lines.append("measured peaks:")
        lines += [
            f"  {name:<8} {size / 2**30:8.3f} GiB{'   <- here' if name == part else ''}" for name, size in peaks.items()
        ]
    if expected:
        lines.append("estimated (klimb plan):")
        lines += [f"  {line}" for line in memory_lines(expected, part, "here")]
    lines.append("try, in this order:")
    lines += [f"  {i}. {_shown(remedy)}" for i, remedy in enumerate(memory_remedies(facts, part), start=1)]
    lines.append(
        "the same command with one of these goes on from the newest checkpoint where the run allows the change"
    )
    return "\n".join(lines)


def _shown(remedy: Remedy) -> str:
    return remedy.text + (f":  {remedy.override}" if remedy.override else "")


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a process wrote before it ended: step, phase, and the kernel's count of kills when it started."""

    step: int
    part: str
    kills: int | None


class LastWords:
    """The phase that a run is in, on disk for as long as it runs."""

    def __init__(self, folder: Path, speaks: bool = True) -> None:
        """speaks: False on all ranks but the first."""
        self._place, self._speaks = folder / NAME, speaks
        self._kills = kills()

    def say(self, step: int, part: str) -> None:
        """A write without a sync: it has to outlive the process, not the machine."""
        if not self._speaks:
            return
        words = {"step": step, "part": part, "kills": self._kills}
        try:
            self._place.write_text(json.dumps(words), encoding="utf-8")
        except OSError:
            return  # a full disk is said by what has to be written, not by this

    def end(self) -> None:
        if self._speaks:
            self._place.unlink(missing_ok=True)


def left_behind(folder: Path) -> Words | None:
    """The words of a process that ended without taking them back; None when there is no such."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return Words(step=int(found["step"]), part=str(found["part"]), kills=found["kills"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def kills() -> int | None:
    """Processes that the kernel has killed for want of memory, None where nobody counts."""
    for place in COUNTERS:
        try:
            for line in place.read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            continue
    return None


def obituary(words: Words, peaks: Mapping[str, float], limit: float | None, facts: Facts) -> str | None:
    """What to say of a process that ended without a word. None when the kernel counts, and killed nobody: whoever
    killed it knows why."""
    now = kills()
    where = f"the last process in this folder ended without a word in step {words.step}, phase '{words.part}'"
    if now is not None and words.kills is not None and now > words.kills:
        why = f"; the kernel killed {now - words.kills} process(es) for want of memory meanwhile, most likely this one"
    elif now is None or words.kills is None:
        why = "; if nobody killed it, memory ran out"
    else:
        return None
    return f"{where}{why}.\n{explain(words.part, peaks, limit, facts)}"
