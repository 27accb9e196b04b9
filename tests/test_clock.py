"""Seconds and peak memory of the parts of a turn."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from klimb import clock
from klimb.clock import Clock, measures_peaks, peak_bytes, reset_peak
from klimb.malloc import keep_freed_memory

CPU = torch.device("cpu")
LARGE = 96 * 2**20  # floats take four bytes each


@pytest.mark.parametrize("kept", [False, True])
def test_each_part_has_a_peak_of_its_own(kept: bool) -> None:
    """In a process of its own: what earlier tests freed and the C library kept would not be seen again."""
    code = f"from tests.test_clock import check_peaks; check_peaks({kept})"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_peaks(kept: bool) -> None:
    if kept:
        keep_freed_memory()
    watch = Clock(CPU)
    with watch("rollout"):
        block = torch.ones(LARGE // 4)
        assert block.sum() > 0
        del block
    with watch("score"):
        pass
    with watch("update"):
        half = torch.ones(LARGE // 8)
        assert half.sum() > 0
        del half
    base = watch.peaks["score"]
    assert 0.9 * LARGE < watch.peaks["rollout"] - base < 1.3 * LARGE
    assert 0.4 * LARGE < watch.peaks["update"] - base < 0.7 * LARGE
    metrics = watch.metrics()
    assert metrics["memory/rollout_peak"] == watch.peaks["rollout"]
    assert {"memory/score_peak", "memory/update_peak"} <= metrics.keys()


def test_a_part_met_twice_adds_seconds_and_keeps_the_larger_peak() -> None:
    watch = Clock(CPU)
    for size in (LARGE, 4):
        with watch("rollout"):
            time.sleep(0.01)
            block = torch.ones(size // 4)
            assert block.sum() > 0
            del block
    assert watch.seconds["rollout"] >= 0.02
    assert watch.peaks["rollout"] > LARGE


def test_on_a_cpu_peaks_are_taken_in_some_steps_and_times_in_all() -> None:
    assert [step for step in range(12) if measures_peaks(CPU, step, 0)] == [0, 1, 2, 5, 10]
    assert [step for step in range(8, 16) if measures_peaks(CPU, step, 7)] == [8, 9, 10, 15]
    assert all(measures_peaks(torch.device("cuda"), step, 0) for step in range(12))
    watch = Clock(CPU, measures=False)
    with watch("update"):
        pass
    assert "time/update" in watch.metrics()
    assert not watch.peaks


def test_without_the_kernels_file_the_peak_is_that_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clock, "STATUS", tmp_path / "none")
    monkeypatch.setattr(clock, "RESET", tmp_path / "no" / "such")
    reset_peak(CPU)
    assert peak_bytes(CPU) > 50 * 2**20


def test_rates() -> None:
    watch = Clock(CPU, seconds={"rollout": 2.0, "update": 3.0, "eval": 5.0})
    got = watch.metrics({"rollout": 100, "update": 60}, episodes=10)
    assert got["perf/rollout_tokens_per_s"] == 50.0
    assert got["perf/update_tokens_per_s"] == 20.0
    assert got["perf/episodes_per_s"] == 2.0
    assert got["time/step"] == 10.0
