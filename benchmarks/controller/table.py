"""The check runs as markdown tables, whether `pi` keeps its promise, and the picture of KL and coefficient.

python benchmarks/controller/table.py docs/controller.png

Overshoot: largest 5-phase mean of kl/k3 over the target, minus 1. Settled: the phase from which on that mean stays
within 50% of the target to the end. Reward and KL: means of the last 50 phases.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import check
import matplotlib as mpl
import numpy as np
import one

mpl.use("Agg")
import matplotlib.pyplot as plt

TARGET = one.TARGET
COLOURS = {"fixed": "tab:gray", "adaptive": "tab:orange", "pi": "tab:blue"}
Key = tuple[str, float, int]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: its smoothed KL and coefficients by phase, and the four numbers of the table."""

    kl: np.ndarray
    coef: np.ndarray
    reward: np.ndarray
    overshoot: float
    settled: float
    final_reward: float
    final_kl: float


def read(name: str) -> Result:
    rows = one.rows(name)
    kl, coef, reward = (np.array([row[key] for row in rows]) for key in ("kl/k3", "kl/coef", "reward/mean"))
    smooth = np.convolve(kl, np.ones(5) / 5, "valid")
    outside = np.flatnonzero(np.abs(smooth / TARGET - 1) > 0.5)
    first = int(outside[-1]) + 1 if len(outside) else 0
    return Result(
        kl=smooth,
        coef=coef,
        reward=reward,
        overshoot=max(smooth.max() / TARGET - 1, 0.0),
        settled=first + 5 if first < len(smooth) else math.inf,
        final_reward=float(reward[-50:].mean()),
        final_kl=float(kl[-50:].mean()),
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def cells(result: Result | None) -> list[str]:
    if result is None:
        return ["not run"] * 4
    settled = "never" if math.isinf(result.settled) else f"{result.settled:.0f}"
    return [f"{result.overshoot:.2f}", settled, f"{result.final_reward:.3f}", f"{result.final_kl:.4f}"]


def near_target(result: Result) -> np.ndarray:
    """Rewards of the phases whose smoothed KL lies within 50% of the target, the last 100 phases only."""
    inside = np.abs(result.kl / TARGET - 1) <= 0.5
    inside[:46] = False
    return result.reward[4:][inside]


def summary(results: dict[str, dict[Key, Result]]) -> str:
    rows = []
    for controller, by_key in results.items():
        runs = list(by_key.values())
        near = np.concatenate([near_target(r) for r in runs])
        off = np.mean([np.abs(np.log(np.maximum(r.kl[46:], 1e-4) / TARGET)).mean() for r in runs])
        rows.append(
            [
                controller,
                f"{np.mean([r.overshoot for r in runs]):.2f}",
                f"{np.median([r.overshoot for r in runs]):.2f}",
                f"{sum(not math.isinf(r.settled) for r in runs)} of {len(runs)}",
                f"{math.exp(off):.2f}",
                f"{np.mean([r.final_reward for r in runs]):.3f}",
                f"{np.mean([r.final_kl for r in runs]):.4f}",
                f"{near.mean():.3f} ({len(near)})" if len(near) else "none",
            ]
        )
    head = ["controller", "overshoot, mean", "median", "settled", "off by a factor", "reward", "KL"]
    return markdown([*head, "reward at target (phases)"], rows)


def verdict(adaptive: dict[Key, Result], pi: dict[Key, Result], keys: list[Key]) -> str:
    """The promise: at most half the overshoot of adaptive, and no less reward, setting by setting and in the mean."""
    half = {k for k in keys if pi[k].overshoot <= adaptive[k].overshoot / 2}
    reward = {k for k in keys if pi[k].final_reward >= adaptive[k].final_reward}
    near = {k for k in keys if pi[k].final_reward >= adaptive[k].final_reward - 0.02}
    lines = [
        f"pi against adaptive, {len(keys)} settings: at most half the overshoot {len(half)}; "
        f"no less reward {len(reward)} (within 0.02: {len(near)}); "
        f"both {len(half & reward)} (within 0.02: {len(half & near)})",
    ]
    groups = {"all": keys} | {f"lr {lr:g}": [k for k in keys if k[1] == lr] for lr in check.RATES}
    groups |= {task: [k for k in keys if k[0] == task] for task in check.TASKS}
    for label, members in groups.items():
        if not members:
            continue
        over = [float(np.mean([runs[k].overshoot for k in members])) for runs in (adaptive, pi)]
        difference = np.array([pi[k].final_reward - adaptive[k].final_reward for k in members])
        error = difference.std(ddof=1) / math.sqrt(len(members)) if len(members) > 1 else math.nan
        lines.append(
            f"{label}: mean overshoot adaptive {over[0]:.2f}, pi {over[1]:.2f} (ratio {over[1] / over[0]:.2f}); "
            f"reward pi - adaptive {difference.mean():+.3f} +- {error:.3f}"
        )
    return "\n".join(lines)


def per_kl(results: dict[str, dict[Key, Result]]) -> str:
    """Mean reward of the last 100 phases by where the smoothed KL was."""
    edges = (0.0, 0.005, 0.01, 0.015, 0.025, 0.035, 0.05, 10.0)
    rows = []
    for low, high in itertools.pairwise(edges):
        line = [f"{low:g} to {high:g}" if high < 1 else f"above {low:g}"]
        for by_key in results.values():
            picked = [r.reward[4:][46:][(r.kl[46:] >= low) & (r.kl[46:] < high)] for r in by_key.values()]
            found = np.concatenate(picked)
            line.append(f"{found.mean():.3f} ({len(found)})" if len(found) >= 10 else f"({len(found)})")
        rows.append(line)
    return markdown(["KL (nats per token)", *(f"{c}: reward (phases)" for c in results)], rows)


def draw(results: dict[str, dict[Key, Result]], picture: Path) -> None:
    """A column per rate; for each task a row of KL and a row of coefficients; both seeds as lines."""
    figure, axes = plt.subplots(
        4, 3, figsize=(11, 9), sharex=True, sharey="row", height_ratios=(3, 2, 3, 2), layout="constrained"
    )
    for (row, task), (column, lr) in itertools.product(enumerate(check.TASKS), enumerate(check.RATES)):
        top, bottom = axes[2 * row][column], axes[2 * row + 1][column]
        top.axhspan(0.5 * TARGET, 1.5 * TARGET, color="0.92")
        top.axhline(TARGET, color="0.5", linewidth=0.8)
        for controller, by_key in results.items():
            for seed in check.SEEDS:
                if (task, lr, seed) not in by_key:
                    continue
                result = by_key[task, lr, seed]
                style: dict[str, Any] = {"color": COLOURS[controller], "linewidth": 1.2, "alpha": 0.85}
                first = min(s for s in check.SEEDS if (task, lr, s) in by_key)
                label = controller if seed == first else None
                top.plot(np.arange(5, len(result.kl) + 5), result.kl, label=label, **style)
                bottom.plot(np.arange(1, len(result.coef) + 1), result.coef, **style)
        top.set_title(f"{task}, lr {lr:g}", fontsize=10)
        top.set_yscale("log")
        top.set_ylim(0.002, 0.2)
        bottom.set_yscale("log")
    for row, name in enumerate(("KL, 5-phase mean", "coefficient") * 2):
        axes[row][0].set_ylabel(name)
    for axis in axes[3]:
        axis.set_xlabel("phase (32 episodes)")
    axes[0][0].legend(fontsize=9, loc="lower right")
    figure.savefig(picture, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    keys: list[Key] = list(itertools.product(check.TASKS, check.RATES, check.SEEDS))
    results: dict[str, dict[Key, Result]] = {}
    for controller in check.CONTROLLERS:
        names = {key: check.name_of(controller, *key) for key in keys}
        found = {key: read(name) for key, name in names.items() if (one.RUNS / name / "done").exists()}
        if found:
            results[controller] = found
    head = [
        "task",
        "lr",
        "seed",
        *(f"{c}: {what}" for c in results for what in ("overshoot", "settled", "reward", "KL")),
    ]
    table = [
        [key[0], f"{key[1]:g}", str(key[2]), *(c for r in results.values() for c in cells(r.get(key)))] for key in keys
    ]
    print(markdown(head, table), "\n")
    print(summary(results), "\n")
    print(per_kl(results), "\n")
    if pairs := results.get("adaptive", {}).keys() & results.get("pi", {}).keys():
        print(verdict(results["adaptive"], results["pi"], [key for key in keys if key in pairs]))
    draw(results, args.picture)


if __name__ == "__main__":
    main()
