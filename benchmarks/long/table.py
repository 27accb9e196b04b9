"""The table of what measure.py kept: peaks and seconds by length, posture and activation checkpointing, what the cached
posture saves, and how peaks grow. Exit code 1 when one with checkpointing grows faster than the tokens.

python benchmarks/long/table.py [--docs]
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from cases import LENGTHS, Case, cases

KEPT = Path(__file__).with_name("measured.json")
DOCS = Path(__file__).parents[2] / "docs" / "long-context.md"
MARKS = ("<!-- table: benchmarks/long/table.py --docs -->", "<!-- end of table -->")
PHASES = ("score", "update")
WHOLE = "whole"
AT_MOST = 2.1
"""For twice the tokens: linear, and what measuring a process's pages is off by (tests/models/test_memory.py)."""

Kept = dict[str, dict[str, Any]]


def load() -> Kept:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def mib(number: float) -> str:
    return f"{round(number / 2**20):,}"


def above(row: dict[str, Any], phase: str) -> int:
    """Bytes of a phase's peak beside models and optimizer states."""
    return row["peak_bytes"][phase] - row["before_bytes"]


def peaks(found: Kept) -> list[str]:
    """One line per case."""
    out = [
        "| tokens | | checkpointing | score, MiB | update, MiB | whole process, MiB | score, s | update, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases():
        if (row := found.get(case.name)) is None:
            continue
        words = [
            f"{case.tokens:,}",
            f"{case.posture}{', PPO' if case.ppo else ''}",
            "yes" if case.checkpointing else "no",
            *(mib(above(row, phase)) for phase in PHASES),
            mib(max(row["peak_bytes"].values())),
            *(f"{row['seconds'][phase]:.1f}" for phase in PHASES),
        ]
        out.append(f"| {' | '.join(words)} |")
    return out


def savings(found: Kept) -> list[str]:
    """What cached saves against explicit, by length and checkpointing."""
    out = [
        "| tokens | checkpointing | score, s | of score and update | peak of score, MiB | peak of update, MiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for tokens in LENGTHS:
        for checkpointing in (False, True):
            pair = [
                found.get(Case(tokens=tokens, explicit=explicit, checkpointing=checkpointing).name)
                for explicit in (True, False)
            ]
            if pair[0] is None or pair[1] is None:
                continue
            slow, fast = pair[0], pair[1]
            saved = slow["seconds"]["score"] - fast["seconds"]["score"]
            words = [
                f"{tokens:,}",
                "yes" if checkpointing else "no",
                f"{saved:.1f}",
                f"{saved / sum(slow['seconds'].values()):.0%}",
                *(mib(above(slow, phase) - above(fast, phase)) for phase in PHASES),
            ]
            out.append(f"| {' | '.join(words)} |")
    return out


def growths(found: Kept) -> list[tuple[str, bool, str, list[float]]]:
    """(posture, checkpointing, phase, peaks at each length by those at half of it)."""
    out: list[tuple[str, bool, str, list[float]]] = []
    for checkpointing in (False, True):
        for explicit in (True, False):
            line = [Case(tokens=tokens, explicit=explicit, checkpointing=checkpointing) for tokens in LENGTHS]
            if any(case.name not in found for case in line):
                continue
            for phase in PHASES:
                sizes = [above(found[case.name], phase) for case in line]
                ratios = [long / short for short, long in pairwise(sizes)]
                out.append((line[0].posture, checkpointing, phase, ratios))
    return out


def growth_lines(found: Kept) -> list[str]:
    heads = [f"{long:,} by {short:,}" for short, long in pairwise(LENGTHS)]
    out = [f"| | checkpointing | phase | {' | '.join(heads)} |", f"| --- | --- | --- |{' --- |' * len(heads)}"]
    return out + [
        f"| {posture} | {'yes' if checkpointing else 'no'} | {phase} | {' | '.join(f'{r:.2f}' for r in ratios)} |"
        for posture, checkpointing, phase, ratios in growths(found)
    ]


def is_linear(found: Kept) -> bool:
    """Whether no peak with activation checkpointing grows faster than the tokens."""
    return all(ratio <= AT_MOST for _, checkpointing, _, ratios in growths(found) if checkpointing for ratio in ratios)


def whole_lines(row: dict[str, Any]) -> list[str]:
    """All that is kept of the whole run."""
    lengths = ", ".join(f"{n:g}" for n in row["response_mean"])
    metrics = "; ".join(f"{name} {', '.join(f'{x:.2g}' for x in values)}" for name, values in row["metrics"].items())
    out = [
        f"The whole run: {row['phases']} steps, mean response {lengths} tokens; {metrics}. Peaks of all its process:"
    ]
    out += ["", "| phase of a step | peak of the whole process, MiB | seconds |", "| --- | --- | --- |"]
    return out + [
        f"| {phase} | {mib(peak)} | {', '.join(f'{s:.1f}' for s in row['seconds'][phase])} |"
        for phase, peak in row["peak_bytes"].items()
    ]


def lines(found: Kept) -> list[str]:
    rows = [found[case.name] for case in cases() if case.name in found]
    if not rows:
        raise SystemExit(f"{KEPT} has no measurement; run benchmarks/long/measure.py first")
    threads = sorted({row["threads"] for row in rows})
    busiest = max(row["others_cores"] for row in rows)
    out = ["Peaks of score and update are those above what models and optimizer states hold before:", ""]
    out += [*peaks(found), "", "What cached saves:", "", *savings(found), ""]
    out += ["Peaks by those of half as many tokens:", "", *growth_lines(found), ""]
    if WHOLE in found:
        out += [*whole_lines(found[WHOLE]), ""]
    said = f"Threads: {', '.join(map(str, threads))}; while the phases ran, others used up to {busiest:.2f} cores."
    verdict = "at most linear" if is_linear(found) else f"NOT linear (more than {AT_MOST} for twice the tokens)"
    return [*out, f"{said} Growth with checkpointing: {verdict}."]


def write_into_docs(text: list[str]) -> None:
    """Between the two marks."""
    old = DOCS.read_text(encoding="utf-8")
    before, _, rest = old.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    DOCS.write_text("\n".join([f"{before}{MARKS[0]}", "", *text, "", f"{MARKS[1]}{after}"]), encoding="utf-8")


def show(docs: bool) -> None:
    found = load()
    text = lines(found)
    print("\n".join(text))
    if docs:
        write_into_docs(text)
    if not is_linear(found):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/long-context.md")
    show(parser.parse_args().docs)


if __name__ == "__main__":
    main()
