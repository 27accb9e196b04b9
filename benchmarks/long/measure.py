"""Measure the cases of cases.py, one process after another with one thread each, and print the table. What is in
measured.json already is not run again. About half an hour on an idle core.

python benchmarks/long/measure.py --whole --docs     # all that is missing, a whole run too; the table into the docs
python benchmarks/long/measure.py --again            # everything anew
python benchmarks/long/measure.py --only grpo-cached-2048

--whole: `klimb train` on prompts of 8,064 tokens with 128 to answer, two phases of two episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import table
from cases import SIZES, Case, cases, whole_tree, write_inputs

from klimb.outlook import largest_peaks

ONE = Path(__file__).with_name("one.py")
OWN_MAPPINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""Each tensor of 64 KiB or more is a mapping of its own: a peak is then what is held, not where room was found."""


def run(command: list[str], threads: int, **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return done.stdout


def measured(case: Case, folder: Path, threads: int) -> dict[str, Any]:
    command = [sys.executable, str(ONE), str(folder), str(case.tokens), case.posture, "--threads", str(threads)]
    command += ["--checkpointing"] * case.checkpointing + ["--ppo"] * case.ppo
    return json.loads(run(command, threads, **OWN_MAPPINGS))


def whole_run(folder: Path, threads: int) -> dict[str, Any]:
    """By the command line, with klimb's own defaults for everything that whole_tree does not set."""
    path = folder / "whole.yaml"
    path.write_text(json.dumps(whole_tree(folder)))  # JSON is YAML
    shutil.rmtree(folder / "runs", ignore_errors=True)
    run([sys.executable, "-c", "from klimb.cli import main; main()", "train", str(path)], threads)
    lines = (folder / "runs" / "whole" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    wanted = ("policy/grad_norm", "policy/first_ratio_dev_max", "mismatch/max_log_ratio", "policy/skipped_steps")
    return {
        "phases": len(rows),
        "response_mean": [row["length/mean"] for row in rows],
        "peak_bytes": {part: int(size) for part, size in largest_peaks(rows).items()},
        "seconds": {p: [round(row[f"time/{p}"], 3) for row in rows] for p in ("rollout", *table.PHASES)},
        "metrics": {name: [row[name] for row in rows] for name in wanted},
        "threads": threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the case of this name")
    parser.add_argument("--again", action="store_true", help="also those that are there already")
    parser.add_argument("--whole", action="store_true", help="also a whole run")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/long-context.md")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / "klimb-bench-long"
    write_inputs(folder, SIZES[:1])
    found = table.load()
    jobs = {case.name: lambda case=case: measured(case, folder, args.threads) for case in cases()}
    if args.whole:
        jobs[table.WHOLE] = lambda: whole_run(folder, args.threads)
    for name, job in jobs.items():
        if args.only not in (None, name) or (name in found and not args.again):
            continue
        found[name] = job()
        print(name, json.dumps(found[name]), flush=True)
        order = [case.name for case in cases()] + [table.WHOLE]
        table.KEPT.write_text(json.dumps({n: found[n] for n in order if n in found}, indent=1) + "\n")
    table.show(args.docs)


if __name__ == "__main__":
    main()
