"""Does every estimator and every policy loss learn? 30 phases of 64 episodes from the playground's SFT model, 3 seeds.

python benchmarks/learning.py run          # starts what is not there yet, two at once, one thread each
python benchmarks/learning.py table        # markdown: slope of the training reward over the three seeds together

The slope is least squares over phases, all seeds in one line with an offset each; its standard error is the usual one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

RUNS = Path("runs/learning")
PHASES, EPISODES, SEEDS = 30, 64, (0, 1, 2)
ALWAYS = (
    "recipes/arithmetic.yaml",
    f"training.total_episodes={PHASES * EPISODES}",
    f"training.save_freq={PHASES * EPISODES}",
    "training.lr_scheduler=constant",
    "training.resume=auto",
    "data.eval_files=[]",
    "logging.tensorboard=false",
    "logging.samples_per_phase=0",
    "algorithm.kl_ctrl.init_kl_coef=0.15",
    f"run.dir={RUNS}",
)
GROUP = ("actor_rollout_ref.rollouts_per_prompt=8",)
ESTIMATORS: dict[str, tuple[str, ...]] = {
    "gae": (),
    "grpo": GROUP,
    "rloo": GROUP,
    "reinforce_pp": (),
    "reinforce_pp_baseline": GROUP,
    "remax": (),
    "opo": GROUP,
    "grpo_passk": GROUP,
    "maxrl": GROUP,
}
LOSSES: dict[str, tuple[str, ...]] = {
    "clip": (),
    "gspo": ("algorithm.clip_ratio_low=0.01", "algorithm.clip_ratio_high=0.01"),
    "cispo": (),
    "gmpo": ("algorithm.clip_ratio_low=0.4", "algorithm.clip_ratio_high=0.4"),
    "sapo": (),
    "reinforce": (),
}
SETTINGS: dict[str, tuple[str, ...]] = {
    **{f"estimator-{name}": (f"algorithm.adv_estimator={name}", *more) for name, more in ESTIMATORS.items()},
    **{
        f"loss-{name}": ("algorithm.adv_estimator=grpo", f"algorithm.policy_loss={name}", *GROUP, *more)
        for name, more in LOSSES.items()
    },
}


def rows(name: str, seed: int) -> list[dict[str, Any]]:
    place = RUNS / f"{name}-{seed}" / "metrics.jsonl"
    return [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []


def run_all(jobs: int) -> None:
    waiting = [(name, seed) for seed in SEEDS for name in SETTINGS if len(rows(name, seed)) < PHASES]
    total, begin, finished = len(waiting), time.monotonic(), 0
    print(f"{len(SETTINGS) * len(SEEDS) - total} runs are there, {total} to go", flush=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, seed = waiting.pop(0)
            overrides = (*ALWAYS, *SETTINGS[name], f"training.seed={seed}", f"run.name={name}-{seed}")
            with (RUNS / f"{name}-{seed}.log").open("w") as log:
                running[f"{name}-{seed}"] = subprocess.Popen(
                    [sys.executable, "-c", "import klimb.cli; klimb.cli.main()", "train", *overrides],
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        time.sleep(0.5)
        for key in [key for key, process in running.items() if process.poll() is not None]:
            code = running.pop(key).returncode
            finished += 1
            left = (time.monotonic() - begin) / finished * (total - finished) / 60
            print(
                f"{key}: {'done' if code == 0 else f'FAILED, see {RUNS / key}.log'} | {left:.1f} min left", flush=True
            )


def slope(curves: list[list[float]]) -> tuple[float, float]:
    """Change of the reward per phase and its standard error: least squares with an offset per seed."""
    xs, ys = [], []
    for curve in curves:
        x = np.arange(len(curve), dtype=float)
        xs.append(x - x.mean())
        ys.append(np.asarray(curve) - np.mean(curve))
    x, y = np.concatenate(xs), np.concatenate(ys)
    b = float((x * y).sum() / (x * x).sum())
    spare = len(x) - len(curves) - 1
    return b, float(np.sqrt(((y - b * x) ** 2).sum() / spare / (x * x).sum()))


def table() -> None:
    print("| | name | slope, reward per phase | standard error | first 5 phases | last 5 phases | KL of the last 5 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for setting in SETTINGS:
        kind, name = setting.split("-", 1)
        runs = [found for seed in SEEDS if (found := rows(setting, seed))]
        if len(runs) < len(SEEDS):
            print(f"| {kind} | {name} | {len(runs)} of {len(SEEDS)} seeds have run |  |  |  |  |")
            continue
        curves = [[row["reward/mean"] for row in run] for run in runs]
        b, error = slope(curves)
        first, last = np.mean([c[:5] for c in curves]), np.mean([c[-5:] for c in curves])
        kl = np.mean([[row.get("kl/k3", np.nan) for row in run[-5:]] for run in runs])
        print(f"| {kind} | {name} | {b:+.4f} | {error:.4f} | {first:.3f} | {last:.3f} | {kl:.4f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    run_all(args.jobs) if args.what == "run" else table()


if __name__ == "__main__":
    main()
