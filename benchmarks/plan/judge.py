"""How far estimates are from what was measured, for the configs that no constant was fitted on.

python benchmarks/plan/judge.py [--all] [--markdown]

Memory: the highest measured peak of a run against the highest estimated one (asked for: within 15%), also without the
constant part of a process, which every run on a CPU has; seconds of a whole step (asked for: within 25%).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from cases import Case, fitted_names
from predict import load, setup

from klimb.estimate.duration import cpu_speed, seconds
from klimb.estimate.fitted import FITTED
from klimb.estimate.memory import peaks

PHASES = ("rollout", "score", "update")
MEMORY, TIME = 0.15, 0.25


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """measured and estimated: bytes of each phase's peak, seconds of each phase."""

    name: str
    is_fitted: bool
    peaks: dict[str, float]
    expected_peaks: dict[str, float]
    seconds: dict[str, float]
    expected_seconds: dict[str, float]
    others: float

    @property
    def memory_error(self) -> float:
        return max(self.expected_peaks.values()) / max(self.peaks.values()) - 1

    @property
    def own_error(self) -> float:
        """Of what a run adds to the process."""
        base = FITTED["process_bytes"]
        return (max(self.expected_peaks.values()) - base) / (max(self.peaks.values()) - base) - 1

    @property
    def time_error(self) -> float:
        return sum(self.expected_seconds.values()) / sum(self.seconds.values()) - 1

    @property
    def is_within(self) -> bool:
        return abs(self.memory_error) <= MEMORY and abs(self.time_error) <= TIME


def verdict(case: Case, measured: dict[str, Any]) -> Verdict:
    one = setup(case, measured)
    spent = seconds(one, cpu_speed(measured["rate"], 1))
    return Verdict(
        name=case.name,
        is_fitted=case.name in fitted_names(),
        peaks={p: float(measured["peak_bytes"][p]) for p in PHASES},
        expected_peaks={p.phase: p.total for p in peaks(one) if p.phase in PHASES},
        seconds={p: float(measured["seconds"][p]) for p in PHASES},
        expected_seconds={p: spent[p] for p in PHASES},
        others=measured["others_cores"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also those that were fitted on")
    parser.add_argument("--phases", action="store_true", help="each phase's errors")
    args = parser.parse_args()
    print("| config | peak MiB | estimate | error | without process | step s | estimate | error | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    found = [verdict(case, measured) for case, measured in load().values()]
    found = [v for v in found if args.all or not v.is_fitted]
    for v in found:
        top, expected = max(v.peaks.values()) / 2**20, max(v.expected_peaks.values()) / 2**20
        spent, guess = sum(v.seconds.values()), sum(v.expected_seconds.values())
        note = ("fitted" if v.is_fitted else "") + ("" if v.is_within else " OUTSIDE")
        print(
            f"| {v.name} | {top:,.0f} | {expected:,.0f} | {v.memory_error:+.0%} | {v.own_error:+.0%} | {spent:.2f} | "
            f"{guess:.2f} | {v.time_error:+.0%} | {note.strip()} |"
        )
        if args.phases:
            for p in PHASES:
                m, t = v.expected_peaks[p] / v.peaks[p] - 1, v.expected_seconds[p] / v.seconds[p] - 1
                print(
                    f"    {p:<8} {v.peaks[p] / 2**20:7,.0f} MiB {m:+.0%}   {v.seconds[p]:7.3f} s {t:+.0%}  "
                    f"others {v.others:.2f}"
                )
    judged = [v for v in found if not v.is_fitted]
    memory = sum(abs(v.memory_error) <= MEMORY for v in judged)
    time = sum(abs(v.time_error) <= TIME for v in judged)
    print(
        f"\n{len(judged)} configs kept back: memory within {MEMORY:.0%} in {memory}, time within {TIME:.0%} in {time}"
    )


if __name__ == "__main__":
    main()
