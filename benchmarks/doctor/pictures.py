"""The pictures of docs/doctor.md: for every finding a run of the bench that has it.

python benchmarks/doctor/run.py --seeds 1 --healthy 0 --extra      # the runs
python benchmarks/doctor/pictures.py                               # docs/doctor/FINDING.png

Left the series that the finding was read from, with the steps between which it holds; right what the run was after.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from judge import case_named, load
from matplotlib.figure import Figure

from klimb.doctor.finding import Finding
from klimb.doctor.rules import examine
from klimb.doctor.table import Table

FOLDER = Path("docs/doctor")
RUNS = {
    "kl_explosion": "lr_too_high-00",
    "kl_vanished": "kl_held-00",
    "reward_degenerate": "reward_scaled_to_zero-00",
    "reward_volatile": "judge_unsteady-00",
    "reward_hacking": "reward_hackable-00",
    "ratio_spikes": "batch_reused-00",
    "engine_mismatch": "engine_temperature-00",
    "entropy_collapse": "entropy_lost-00",
    "entropy_explosion": "temperature_high-00",
    "length_drift": "entropy_lost-02",
    "truncation": "limit_too_short-00",
    "repetition": "lr_too_high-01",
    "critic_failing": "critic_frozen-00",
    "coefficient_pinned": "coefficient_pinned_high-00",
    "nonfinite": "nan_gradient-00",
    "memory_pressure": "memory_short-00",
}
COLOR, SOFT, BAND = "#1f6fb4", "#667080", "#c0262d"
LOG = ("kl/k3", "policy/ratio_abs_dev", "policy/approx_kl", "reward/std")


def draw(code: str, finding: Finding, rows: list[dict[str, Any]], name: str) -> None:
    look = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e9ecf0"}
    with mpl.rc_context(look):
        figure = Figure(figsize=(9.6, 2.7), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, key, color in ((left, finding.series, COLOR), (right, "reward/mean", "#0b8565")):
            found = [(row["step"], float(row[key])) for row in rows if key in row]
            if axes is left and key in LOG:
                found = [(step, max(value, 1e-10)) for step, value in found]
                axes.set_yscale("log")
            steps, values = zip(*found, strict=True)
            axes.plot(steps, values, color=color, linewidth=1.4, marker="o" if len(steps) < 12 else None, markersize=4)
            axes.set_title(key, loc="left", fontsize=9, fontweight="bold")
            axes.set_xlabel("step", fontsize=8)
            axes.tick_params(labelsize=8)
        evals = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
        if evals:
            right.plot(*zip(*evals, strict=True), color="#cc5a0c", linewidth=1.2, marker="o", markersize=3)
            right.set_title("reward/mean (green), eval/accuracy (orange)", loc="left", fontsize=9, fontweight="bold")
        left.axvspan(finding.first, finding.last, color=BAND, alpha=0.1, linewidth=0)
        left.axvline(finding.named, color=BAND, linewidth=1.2, linestyle=":")
        target = [float(row["kl/target"]) for row in rows if "kl/target" in row]
        if finding.series == "kl/k3" and target and math.isfinite(target[-1]):
            left.axhline(target[-1], color=SOFT, linewidth=1, linestyle="--")
        figure.savefig(FOLDER / f"{code}.png", dpi=90)
    print(f"{code}: {name}, {finding.severity}, steps {finding.first} to {finding.last}, named at {finding.named}")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for code, name in RUNS.items():
        found = load(case_named(name))
        if found is None:
            print(f"{code}: {name} has not run")
            continue
        rows, facts = found
        table = Table.of(row for row in rows if row["step"] > 0 or "eval/accuracy" in row)
        finding = next((f for f in examine(table, facts).findings if f.code == code), None)
        if finding is None:
            print(f"{code}: {name} does not have it")
            continue
        draw(code, finding, rows, name)


if __name__ == "__main__":
    main()
