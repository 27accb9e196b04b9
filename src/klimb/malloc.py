"""Freed memory that stays with the process.

glibc hands large freed blocks back to the kernel, which must give them again, page by page and zeroed, to the next
large tensor: on a CPU that is a fifth of an update's time (docs/performance.md).
"""

from __future__ import annotations

import ctypes

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BYTES = 2**30


def give_back() -> None:
    """Hand what is free at this moment back to the kernel, so that what follows can be measured by itself."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


def keep_freed_memory() -> bool:
    """From now on blocks of up to a GiB come from memory that is kept when it is freed. False where the C library has
    no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(name, _BYTES) == 1 for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
