"""Freed memory is kept: the next large tensor meets pages that are there already."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from klimb.malloc import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def work():
    a = [torch.ones(10_000_000) for _ in range(3)]  # 40 MB each: more than glibc ever keeps by itself
    return a[0][0]
for _ in range(12):  # holes do not fit at once: an aligned block asks for a little more than it is
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's mallopt")
def test_large_tensors_meet_no_fresh_pages() -> None:
    assert faults("leave") > 20_000
    assert faults("keep") < 1_000
