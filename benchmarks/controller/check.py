"""The controllers side by side in real runs: 3 learning rates x 2 tasks x 2 seeds x 3 controllers, 150 phases each.

python benchmarks/controller/check.py [fixed adaptive pi]

None of these rates and seeds was used to choose the gains of `pi`. Starts only what is not in runs/controller yet;
table.py reads the runs.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import one

RATES = (3e-5, 1e-4, 3e-4)
TASKS = ("arithmetic", "instructions")
SEEDS = (0, 1)
CONTROLLERS: dict[str, dict[str, Any]] = {
    "fixed": {"type": "fixed"},
    "adaptive": {"type": "adaptive", "horizon": 10.0 * one.EPISODES},
    "pi": {"type": "pi"},
}


def name_of(controller: str, task: str, lr: float, seed: int) -> str:
    return f"check-{controller}-{task}-{lr:g}-{seed}"


def settings(controllers: list[str]) -> dict[str, dict[str, Any]]:
    return {
        name_of(c, task, lr, seed): {"task": task, "lr": lr, "seed": seed, "control": CONTROLLERS[c]}
        for c, seed, lr, task in itertools.product(controllers, SEEDS, RATES, TASKS)
    }


def main() -> None:
    if failed := one.start_all(settings(sys.argv[1:] or list(CONTROLLERS))):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
