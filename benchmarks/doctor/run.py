"""Run the doctor's bench: faulty and healthy runs of 60 to 80 steps on the playground.

python benchmarks/doctor/run.py --seeds 8 --healthy 18 --jobs 2       # what is there already is not run again
python benchmarks/doctor/judge.py                                     # the confusion table

Each job is one process of one thread that runs one case after the other. A run's folder keeps its log; checkpoints are
removed. `pack` writes the tables of all runs into one file, from which rules can be judged again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

from cases import EXTRA, MODES, Case, all_cases, faulty, guarded

ROOT = Path("runs/doctor")


def done(case: Case) -> bool:
    return (ROOT / case.run_name / "end.txt").exists()


def other_model(folder: Path) -> None:
    """An SFT model with the playground's tokenizer, from another seed and a third of the steps."""
    if folder.exists():
        return
    from transformers import AutoTokenizer

    from klimb.config.paths import model_folder
    from klimb.playground.settings import PlaygroundSettings
    from klimb.playground.sft import train_sft

    tokenizer = AutoTokenizer.from_pretrained(model_folder("playground:sft"))
    beside = folder.with_name("other_model.tmp")
    settings = replace(PlaygroundSettings(), seed=1, sft_steps=300)
    train_sft(tokenizer, settings, beside, lambda *args: None)
    beside.rename(folder)


def work(waiting: list[Case], total: int, begin: float) -> None:
    """One process, fed a case at a time."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("one.py")), str(ROOT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(ROOT / "errors.log").open("a"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    while waiting:
        case = waiting.pop(0)
        process.stdin.write(f"{case.run_name}\n")
        process.stdin.flush()
        answer = process.stdout.readline().strip()
        if not answer:
            print(f"{case.run_name}: the process died, see {ROOT / 'errors.log'}", flush=True)
            return
        shutil.rmtree(ROOT / case.run_name / "checkpoints", ignore_errors=True)
        finished = total - len(waiting)
        left = (time.monotonic() - begin) / max(1, finished - 1) * len(waiting) / 60
        print(f"{answer} | {finished}/{total}, {left:.0f} min left", flush=True)
    process.stdin.close()
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="runs of each fault")
    parser.add_argument("--healthy", type=int, default=18, help="runs of each healthy recipe")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--guard", type=int, default=0, help="runs of each posture with and without the guard")
    parser.add_argument("--extra", action="store_true", help="runs that only the pictures need")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    ROOT.mkdir(parents=True, exist_ok=True)
    other_model(ROOT / "other_model")
    cases = all_cases(range(args.seeds), range(args.healthy))
    cases += [faulty(name, 0) for name in EXTRA if args.extra]
    for seed in range(args.guard):
        cases += [guarded(posture, mode, seed) for posture in ("explicit", "cached") for mode in MODES]
    waiting = [case for case in cases if args.only in case.run_name and not done(case)]
    print(f"{len(cases) - len(waiting)} of {len(cases)} runs are there, {len(waiting)} to go", flush=True)
    begin, total = time.monotonic(), len(waiting)
    threads = [Thread(target=work, args=(waiting, total, begin)) for _ in range(min(args.jobs, total))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
