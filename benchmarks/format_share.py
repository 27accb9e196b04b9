"""How much of a gain on one-digit sums is format alone, from answers written by `klimb eval --samples`.

    klimb eval recipes/smollm2-arithmetic.yaml --samples before.jsonl
    klimb eval runs/smollm2-arithmetic --samples after.jsonl
    python benchmarks/format_share.py before.jsonl after.jsonl

An answer names a result when it holds a number besides the two summands. Format alone: the answers name a
result as often as afterwards, and are right as often as before, among those that name one and among those that do not.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path


def names_a_result(prompt: str, response: str) -> bool:
    numbers = re.findall(r"\d+", response)
    for summand in re.findall(r"\d+", prompt)[-2:]:
        if summand in numbers:
            numbers.remove(summand)
    return bool(numbers)


def shares(path: Path) -> tuple[float, float, float]:
    """Share naming a result, share right among those, share right among the others."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    named = [row["correct"] for row in rows if names_a_result(row["prompt"], row["response"])]
    others = [row["correct"] for row in rows if not names_a_result(row["prompt"], row["response"])]
    return len(named) / len(rows), sum(named) / max(1, len(named)), sum(others) / max(1, len(others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    args = parser.parse_args()
    (n0, r0, o0), (n1, r1, o1) = shares(args.before), shares(args.after)
    right0, right1, alone = n0 * r0 + (1 - n0) * o0, n1 * r1 + (1 - n1) * o1, n1 * r0 + (1 - n1) * o0
    print("| | before | after |\n| --- | --- | --- |")
    print(f"| right | {right0:.1%} | {right1:.1%} |")
    print(f"| names a result | {n0:.1%} | {n1:.1%} |")
    print(f"| right among those | {r0:.1%} | {r1:.1%} |")
    print(f"\ngain {100 * (right1 - right0):+.1f} points, of which format alone {100 * (alone - right0):+.1f}")


if __name__ == "__main__":
    main()
