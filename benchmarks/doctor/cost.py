"""What the rules cost in a run of 2,000 steps, beside the time of its steps.

OMP_NUM_THREADS=1 python benchmarks/doctor/cost.py [RUN_FOLDER]

The rows of a finished run are shown to the doctor again and again, with steps that count up, as a run of that length
would show them. The time of a step is the median of the run's own time/step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import fmean, median

import yaml

from klimb.doctor.finding import Facts
from klimb.watch import Watch

STEPS = 2000


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    watch = Watch(Facts.of(yaml.safe_load((folder / "config.yaml").read_text())))
    watch.see(rows[0])  # scipy is imported here
    costs: list[float] = []
    for step in range(2, STEPS + 1):
        row = rows[step % len(rows)] | {"step": step, "episodes": step * rows[0]["episodes"]}
        begin = time.perf_counter()
        findings = watch.see(row)
        watch.news(findings)
        watch.current_alarms(findings)
        costs.append(time.perf_counter() - begin)
    of_step = median(row["time/step"] for row in rows)
    for name, part in (("first 100", costs[:100]), ("last 100", costs[-100:]), ("all", costs)):
        print(f"{name:>9} steps: {1000 * fmean(part):.2f} ms a step, {fmean(part) / of_step:.2%} of {of_step:.3g} s")


if __name__ == "__main__":
    main()
