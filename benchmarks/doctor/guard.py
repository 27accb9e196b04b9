"""Does the guard save runs that explode? Rates 20 to 50 times too high, in each posture, with and without it.

python benchmarks/doctor/run.py --seeds 0 --healthy 0 --guard 5       # 30 runs
python benchmarks/doctor/guard.py                                     # the table, and docs/guard.png

A run is lost when it does not finish, when its KL (median of the last ten steps) is three times the target of 0.02 or
more, or when its reward (mean of the last ten steps) is under 80% of that of the run with a sound rate and its seed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

from cases import MODES, guarded

ROOT, PICTURE = Path("runs/doctor"), Path("docs/guard.png")
TARGET, LAST = 0.02, 10
COLORS = {"sound": "#0b8565", "warn": "#cc5a0c", "rollback": "#1f6fb4"}
NAMES = {"sound": "sound rate", "warn": "rate too high", "rollback": "rate too high, with the guard"}


def rows(posture: str, mode: str, seed: int) -> list[dict[str, Any]]:
    folder = ROOT / guarded(posture, mode, seed).run_name
    if not (folder / "end.txt").exists():
        return []
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def interventions(posture: str, seed: int) -> list[dict[str, Any]]:
    place = ROOT / guarded(posture, "rollback", seed).run_name / "interventions.jsonl"
    return [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []


def end(run: list[dict[str, Any]]) -> tuple[float, float]:
    """KL and reward of the last steps."""
    kls = [float(row["kl/k3"]) for row in run[-LAST:] if "kl/k3" in row]
    return median(kls) if kls else math.nan, fmean(row.get("reward/mean", 0.0) for row in run[-LAST:])


def main() -> None:
    print("| posture | seed | rate | with a sound rate: KL, reward | without the guard | with it | interventions |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    saved, lost, total = 0, 0, 0
    for posture in ("explicit", "cached"):
        for seed in range(64):
            runs = {mode: rows(posture, mode, seed) for mode in MODES}
            if not all(runs.values()):
                continue
            total += 1
            case, sound = guarded(posture, "rollback", seed), end(runs["sound"])
            cells, fine = [], {}
            for mode in ("warn", "rollback"):
                kl, reward = end(runs[mode])
                fine[mode] = len(runs[mode]) == case.steps and kl < 3 * TARGET and reward >= 0.8 * sound[1]
                cells.append(f"{kl:.3g}, {reward:.3f}{'' if fine[mode] else ' lost'}")
            saved, lost = saved + fine["rollback"], lost + (not fine["warn"])
            made = "; ".join(" ".join(entry["overrides"]) for entry in interventions(posture, seed))
            line = (posture, seed, f"{case.strength:.3g}", f"{sound[0]:.3g}, {sound[1]:.3f}", *cells, made)
            print(f"| {' | '.join(map(str, line))} |")
    print(f"\n{saved} of {total} saved with the guard, {lost} of {total} lost without it")
    draw()


def draw() -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e9ecf0"}
    ):
        figure = Figure(figsize=(12, 6.4), layout="constrained")
        axes = figure.subplots(2, 2, sharex=True)
        for column, posture in enumerate(("explicit", "cached")):
            for row, (key, name) in enumerate((("kl/k3", "KL, nats per token"), ("reward/mean", "training reward"))):
                place = axes[row][column]
                place.set_title(f"{name}: {posture} posture", loc="left", fontsize=10, fontweight="bold")
                for mode in MODES:
                    for seed in range(64):
                        run = rows(posture, mode, seed)
                        label = NAMES[mode] if seed == 0 else None
                        steps = [r["step"] for r in run if key in r]
                        values = [max(float(r[key]), 1e-5) if row == 0 else float(r[key]) for r in run if key in r]
                        place.plot(steps, values, color=COLORS[mode], linewidth=1.1, alpha=0.8, label=label)
                if row == 0:
                    place.set_yscale("log")
                    place.axhline(TARGET, color="#667080", linewidth=1, linestyle="--")
                else:
                    place.set_xlabel("step")
        axes[0][0].legend(frameon=False, fontsize=9)
        figure.savefig(PICTURE, dpi=110)
        print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
