"""Lines of an estimate."""

from __future__ import annotations

from klimb.estimate.memory import Peak
from klimb.estimate.show import beside_lines, duration, memory_lines, time_line

MIB, GIB = 2.0**20, 2.0**30
PEAKS = (
    Peak(phase="rollout", parts={"weights": 100 * MIB, "cache": 50 * MIB}),
    Peak(phase="update", parts={"weights": 100 * MIB, "gradients": 100 * MIB}),
)


def test_parts_that_occur_are_columns_and_the_phase_is_marked() -> None:
    head, rollout, update = memory_lines(PEAKS, "update", "here")
    assert head.split() == ["MiB", "weights", "gradients", "cache", "together"]
    assert rollout.split() == ["rollout", "100", "50", "150"]
    assert update.split() == ["update", "100", "100", "200", "<-", "here"]
    assert len(rollout) == len(head)


def test_large_sizes_are_in_gib() -> None:
    lines = memory_lines([Peak(phase="update", parts={"weights": 20 * GIB})], "", "here")
    assert lines[0].startswith("GiB")
    assert lines[1].split() == ["update", "20.0", "20.0"]


def test_measured_stands_beside_estimated_with_the_error() -> None:
    lines = beside_lines({"rollout": 100 * MIB, "update": 250 * MIB}, PEAKS, {"rollout": 2.0}, {"rollout": 1.0})
    assert lines[1].split() == ["rollout", "100", "150", "+50%", "2", "1", "-50%"]
    assert lines[2].split() == ["update", "250", "200", "-20%"]


def test_durations_for_people() -> None:
    assert [duration(x) for x in (0.1234, 89.0, 120.0, 7200.0)] == ["0.123 s", "89 s", "2.0 min", "2.0 h"]
    assert time_line({"rollout": 1.0, "update": 2.0}) == "3 s a step: rollout 1 s, update 2 s"
