"""Real runs with coefficients set from outside, for the plant model to be fitted on: recorded.json.

python benchmarks/controller/record.py

Task arithmetic, two learning rates, fixed coefficients and stairs of them, seeds from 100 on: none of the seeds
and rates that check.py uses. Starts only what is not in runs/controller yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import one

HERE = Path(__file__).parent
RATES = (6e-5, 2e-4)
COEFS = (0.02, 0.2, 1.0)
STAIRS = {6e-5: [0.02, 0.3, 0.03, 1.0, 0.1, 0.02], 2e-4: [0.05, 1.0, 0.1, 3.0, 0.3, 0.03]}
KEYS = {"kl": "kl/k3", "coef": "kl/coef", "reward": "reward/mean"}


def settings() -> dict[str, dict[str, Any]]:
    fixed: dict[str, str] = {"type": "fixed"}
    out: dict[str, dict[str, Any]] = {}
    for i, lr in enumerate(RATES):
        base = {"task": "arithmetic", "lr": lr}
        out[f"stairs-{lr:g}"] = {**base, "seed": 190 + i, "control": fixed, "stairs": STAIRS[lr]}
        for j, coef in enumerate(COEFS):
            control = {**fixed, "init_kl_coef": coef}
            out[f"fixed-{lr:g}-{coef:g}"] = {**base, "seed": 100 + 10 * i + j, "control": control}
    return out


def main() -> None:
    wanted = settings()
    if failed := one.start_all(wanted):
        raise SystemExit(f"failed: {', '.join(failed)}")
    recorded = []
    for name, setting in wanted.items():
        rows = one.rows(name)
        columns = {short: [float(f"{row[key]:.5g}") for row in rows] for short, key in KEYS.items()}
        recorded.append({"name": name, "lr": setting["lr"], "seed": setting["seed"], **columns})
    text = ",\n".join(json.dumps(run) for run in recorded)
    (HERE / "recorded.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
