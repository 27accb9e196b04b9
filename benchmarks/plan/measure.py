"""Measure the configs of cases.py: short real runs, one after another, each a process of its own with one thread per
rank. What is in measured.json already is not run again.

python benchmarks/plan/measure.py                       # all that is missing, about twenty minutes on an idle machine
python benchmarks/plan/measure.py --again --ranks 1     # those of one rank, anew
python benchmarks/plan/measure.py --only ppo-cached-3m
python benchmarks/plan/fit.py && python benchmarks/plan/judge.py --docs

Kept of every run: the largest measured peak of each phase over all steps, the median seconds of each phase without the
first step, the lengths that occurred, the pace of the machine as the run measured it, and how many cores others used.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import Case, cases, tree, write_inputs

from klimb.outlook import largest_peaks

KEPT = Path(__file__).with_name("measured.json")
PHASES = ("rollout", "score", "update")


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine used so far."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def run(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """One run by the command line, and what is kept of it."""
    import resource

    path = folder / f"{case.name}.yaml"
    path.write_text(json.dumps(tree(case, folder, steps)))  # JSON is YAML
    shutil.rmtree(folder / "runs" / case.name, ignore_errors=True)
    command = [sys.executable, "-c", "from klimb.cli import main; main()", "train", str(path)]
    start, busy, own = time.time(), busy_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{case.name}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime
    others = max(0.0, busy_seconds() - busy - used) / (time.time() - start)
    lines = (folder / "runs" / case.name / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(folder / "runs" / case.name)
    return kept([json.loads(line) for line in lines], case) | {"others_cores": round(others, 3)}


def kept(rows: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    return {
        "peak_bytes": {part: int(size) for part, size in largest_peaks(rows).items()},
        "seconds": {p: round(statistics.median(row[f"time/{p}"] for row in rows[1:]), 4) for p in PHASES},
        "response_mean": round(statistics.mean(row["length/mean"] for row in rows[1:]), 3),
        "response_longest": int(max(row["length/max"] for row in rows)),
        "truncated": round(statistics.mean(row["length/truncated"] for row in rows), 4),
        "prompt": case.prompt,
        "pace": {
            "products": rows[0]["perf/rate"] / case.ranks,  # logged for all ranks together
            "moved": rows[0]["perf/byte_rate"],
            "calls": rows[0]["perf/call_rate"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the case of this name")
    parser.add_argument("--ranks", type=int, help="only cases of so many ranks")
    parser.add_argument("--again", action="store_true", help="also those that are there already")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / "klimb-bench-plan"
    write_inputs(folder)
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for case in cases():
        wanted = args.only in (None, case.name) and args.ranks in (None, case.ranks)
        if not wanted or (case.name in found and not args.again):
            continue
        found[case.name] = run(case, folder, args.steps)
        print(case.name, json.dumps(found[case.name]), flush=True)
        ordered = {c.name: found[c.name] for c in cases() if c.name in found}
        KEPT.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
