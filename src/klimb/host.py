"""What this machine has, told by its kernel: memory and cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
DEVICES = Path("/dev")


def memory() -> int | None:
    """Bytes that this container may use of the host's; None where that is not known."""
    found: list[int] = []
    for place in (*_own_group(), *CONTAINER):
        try:
            text = place.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    try:
        line = next(row for row in MEMINFO.read_text(encoding="ascii").splitlines() if row.startswith("MemTotal:"))
        found.append(int(line.split()[1]) * 1024)
    except (OSError, StopIteration):
        pass
    return min(found, default=None)


def cores() -> int:
    """Threads that torch takes: what OMP_NUM_THREADS says, else the cores this process may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(asked) if asked.isdigit() and int(asked) > 0 else all_cores()


def all_cores() -> int:
    """Those that this process and the ranks that it starts may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_each(processes: int, threads: int | None = None) -> float:
    """Cores of each of so many processes here that work at once: one a thread (default: as many as torch takes), or its
    part of all where that is less."""
    return min(float(threads or cores()), all_cores() / processes)


def has_gpu() -> bool:
    """Whether the kernel shows a GPU of NVIDIA's; training takes it where torch can."""
    return (DEVICES / "nvidia0").exists()


def _own_group() -> list[Path]:
    """Where the kernel says how much this process's control group may use: version 1 by controller, 2 by path."""
    try:
        lines = GROUPS.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
    out: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            out.append(CONTAINER[1].parent / path.lstrip("/") / CONTAINER[1].name)
        elif not controllers:
            out.append(CONTAINER[0].parent / path.lstrip("/") / CONTAINER[0].name)
    return out
