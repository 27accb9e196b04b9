"""Freed memory that stays with the process, and memory that was refused.

glibc hands large freed blocks back to the kernel, which must give them again, page by page and zeroed, to the next
large tensor: on a CPU that is a fifth of an update's time (docs/performance.md).
"""

from __future__ import annotations

import ctypes

import torch

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BYTES = 2**30
_REFUSALS = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "cuda error: out of memory",
    "cuda out of memory",
)

_ONEDNN = "could not create a primitive"
"""All that oneDNN says when memory for a product's code is refused; with more behind it, it means something else."""


def give_back() -> None:
    """Hand what is free at this moment back to the kernel, so that what follows can be measured by itself, and to the
    GPU, whose memory another process may be waiting for."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _call("malloc_trim", 0)


def keep_freed_memory() -> bool:
    """From now on blocks of up to a GiB come from memory that is kept when it is freed. False where the C library has
    no such setting."""
    return all(_call("mallopt", name, _BYTES) for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def is_exhausted(error: BaseException) -> bool:
    """Whether an allocator refused: CUDA's, torch's for the CPU (a plain RuntimeError), or Python's. CUDA itself, and
    libraries that ask it for memory, raise plain RuntimeErrors too."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(words in text for words in _REFUSALS) or text.strip() == _ONEDNN


def _call(name: str, *args: int) -> bool:
    """Whether the C library has this function and it says that it did something."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return False
    return function(*args) == 1
