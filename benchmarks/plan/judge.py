"""How far estimates are from what was measured, for the configs that no constant was fitted on.

python benchmarks/plan/judge.py [--all] [--phases] [--docs]

Memory: the highest measured peak of a run against the highest estimated one (asked for: within 15%), also without the
constant part of a process, which every run on a CPU has; seconds of a whole step (asked for: within 25%).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import Case, fitted_names
from predict import load, setup

from klimb.estimate.duration import cpu_speed, seconds
from klimb.estimate.fitted import FITTED
from klimb.estimate.memory import peaks

PHASES = ("rollout", "score", "update")
MEMORY, TIME = 0.15, 0.25
DOCS = Path(__file__).parents[2] / "docs" / "plan.md"
MARKS = ("<!-- judge.py --docs writes from here -->", "<!-- to here -->")


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
    spent = seconds(one, cpu_speed(measured["pace"]))
    return Verdict(
        name=case.name,
        is_fitted=case.name in fitted_names(),
        peaks={p: float(measured["peak_bytes"][p]) for p in PHASES},
        expected_peaks={p.phase: p.total for p in peaks(one) if p.phase in PHASES},
        seconds={p: float(measured["seconds"][p]) for p in PHASES},
        expected_seconds={p: spent[p] for p in PHASES},
        others=measured["others_cores"],
    )


def lines(found: list[Verdict], phases: bool) -> list[str]:
    """The table, and the sentence below it."""
    out = [
        "| config | peak MiB | estimate | error | without process | s a step | estimate | error | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for v in found:
        top, expected = max(v.peaks.values()) / 2**20, max(v.expected_peaks.values()) / 2**20
        spent, guess = sum(v.seconds.values()), sum(v.expected_seconds.values())
        note = ("fitted" if v.is_fitted else "") + ("" if v.is_within else " outside")
        out.append(
            f"| {v.name} | {top:,.0f} | {expected:,.0f} | {v.memory_error:+.0%} | {v.own_error:+.0%} | {spent:.2f} | "
            f"{guess:.2f} | {v.time_error:+.0%} | {note.strip()} |"
        )
        out += [phase_line(v, p) for p in PHASES] if phases else []
    judged = [v for v in found if not v.is_fitted]
    memory = sum(abs(v.memory_error) <= MEMORY for v in judged)
    time = sum(abs(v.time_error) <= TIME for v in judged)
    said = f"{len(judged)} configs kept back: memory within {MEMORY:.0%} in {memory}, time within {TIME:.0%} in {time}"
    busiest = max((v.others for v in found), default=0.0)
    return [*out, "", f"{said}; while they ran others used up to {busiest:.2f} cores"]


def phase_line(v: Verdict, phase: str) -> str:
    memory = v.expected_peaks[phase] / v.peaks[phase] - 1
    time = v.expected_seconds[phase] / v.seconds[phase] - 1
    return f"    {phase:<8} {v.peaks[phase] / 2**20:7,.0f} MiB {memory:+.0%}   {v.seconds[phase]:7.3f} s {time:+.0%}"


def write_into_docs(table: list[str]) -> None:
    """Between the two marks in docs/plan.md."""
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    new = "\n".join([f"{before}{MARKS[0]}", "", *table, "", f"{MARKS[1]}{after}"])
    DOCS.write_text(new, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also those that were fitted on")
    parser.add_argument("--phases", action="store_true", help="each phase's errors")
    parser.add_argument("--docs", action="store_true", help="put the table of all into docs/plan.md")
    args = parser.parse_args()
    found = [verdict(case, measured) for case, measured in load().values()]
    table = lines([v for v in found if args.all or args.docs or not v.is_fitted], args.phases)
    print("\n".join(table))
    if args.docs:
        write_into_docs(table)


if __name__ == "__main__":
    main()
