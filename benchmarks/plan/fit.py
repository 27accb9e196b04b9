"""Fit the constants of klimb.estimate on the measured configs that are chosen for it, and write them into the package.

python benchmarks/plan/fit.py [--dry]

Every phase of every such config is one row of two linear systems, each scaled by what was measured, so that relative
errors are made small: peak = process + counted lasting + holes x counted passing, and seconds = sum of a constant times
each kind of counted work. Constants are not negative. The configs of judge.py are not looked at.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np
from cases import fitted_names
from predict import load, setup
from scipy.optimize import nnls

from klimb.estimate import fitted
from klimb.estimate.duration import Pace, Speed, cpu_speed, work
from klimb.estimate.memory import peaks
from klimb.estimate.setup import Setup

PHASES = ("rollout", "score", "update")
PACES = tuple(field.name for field in fields(Pace))
HEAD = '"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""'


def solve(rows: list[dict[str, float]], goals: list[float], names: list[str]) -> dict[str, float]:
    """The constants >= 0 for which sum(row x constant) comes nearest to the goals."""
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, np.array(goals))
    return dict(zip(names, (float(x) for x in found / scale), strict=True))


def fit_memory(chosen: list[tuple[Setup, dict[str, float]]]) -> dict[str, float]:
    """An estimate is linear in every constant, so its factor is what setting it to 1 adds to setting all to 0."""
    names = ["process_bytes", *(f"holes_{phase}" for phase in PHASES)]
    zero = dict.fromkeys(names, 0.0)
    rows, goals = list[dict[str, float]](), list[float]()
    for one, measured in chosen:
        known = {p.phase: p.total for p in peaks(one, zero)}
        factors = {name: {p.phase: p.total for p in peaks(one, {**zero, name: 1.0})} for name in names}
        for phase in PHASES:
            rows.append({name: factors[name][phase] - known[phase] for name in names})
            goals.append((measured[phase] - known[phase]) / measured[phase])
            rows[-1] = {name: factor / measured[phase] for name, factor in rows[-1].items()}
    return solve(rows, goals, names)


def fit_time(chosen: list[tuple[Setup, dict[str, float], Pace]]) -> dict[str, float]:
    names = [field.name for field in fields(Speed)]
    names[-1] = "link_bytes"
    rows, goals = list[dict[str, float]](), list[float]()
    for one, measured, pace in chosen:
        units = astuple(cpu_speed(pace, dict.fromkeys(names, 1.0)))
        for phase, (decode, whole) in work(one).items():
            if phase not in PHASES:
                continue
            exchanged = decode.exchanged + whole.exchanged
            amounts = (decode.products, decode.moved, decode.calls, whole.products, whole.moved, whole.calls, exchanged)
            parts = zip(names, amounts, units, strict=True)
            rows.append({name: amount * unit / measured[phase] for name, amount, unit in parts})
            goals.append(1.0)
    used = [name for name in names if any(row[name] > 0 for row in rows)]
    return {**{name: fitted.FITTED[name] for name in names}, **solve(rows, goals, used)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="print them only")
    args = parser.parse_args()
    found = constants()
    text = "".join(f'    "{name}": {value:.4g},\n' for name, value in found.items())
    print(text, end="")
    if not args.dry:
        Path(fitted.__file__).write_text(f"{HEAD}\n\nFITTED: dict[str, float] = {{\n{text}}}\n")


def constants() -> dict[str, float]:
    """Of the chosen configs among those that were measured."""
    records, chosen = load(), fitted_names()
    mine = [(setup(case, m), m) for name, (case, m) in records.items() if name in chosen]
    memory = fit_memory([(one, m["peak_bytes"]) for one, m in mine])
    time = fit_time([(one, m["seconds"], m["pace"]) for one, m in mine])
    kept = {f"{name}_pace": statistics.median(getattr(m["pace"], name) for _, m in mine) for name in PACES}
    return {**memory, **time, **kept}


if __name__ == "__main__":
    main()
