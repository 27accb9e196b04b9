"""Run one config of cases.py now and say how far its estimate is off.

python benchmarks/plan/check.py grpo-cached-3m-recompute
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from cases import cases, write_inputs
from judge import verdict
from measure import run
from predict import median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[case.name for case in cases()])
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    (case,) = (case for case in cases() if case.name == args.name)
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        measured = run(case, Path(folder), args.steps)
    found = verdict(case, measured | {"pace": median([measured["pace"]])})
    print(
        f"{case.name}: memory {found.memory_error:+.0%}, time {found.time_error:+.0%}, others {found.others:.2f} cores"
    )


if __name__ == "__main__":
    main()
