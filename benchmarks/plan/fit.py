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
from klimb.estimate.duration import Speed, cpu_speed, work
from klimb.estimate.memory import peaks
from klimb.estimate.setup import Setup

PHASES = ("rollout", "score", "update")
HEAD = '"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""'
UNITS = ("products", "bytes", "calls")


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


def fit_time(chosen: list[tuple[Setup, dict[str, float], float]], reference: float) -> dict[str, float]:
    names = [field.name for field in fields(Speed)]
    names[-1] = "link_bytes"
    rows, goals = list[dict[str, float]](), list[float]()
    units = cpu_speed(reference, 1, {**dict.fromkeys(names, 1.0), "rate": reference})
    for one, measured, rate in chosen:
        slower = reference / rate
        for phase, (decode, whole) in work(one).items():
            if phase not in PHASES:
                continue
            row = dict[str, float]()
            for kind, part in (("decode", decode), ("pass", whole)):
                amounts = (part.products * units.decode_products, part.moved, part.calls)
                row |= {f"{kind}_{u}": a * slower for u, a in zip(UNITS, amounts, strict=True)}
            row["link_bytes"] = (decode.exchanged + whole.exchanged) * slower
            rows.append({name: amount / measured[phase] for name, amount in row.items()})
            goals.append(1.0)
    used = [name for name in names if any(row[name] > 0 for row in rows)]
    assert len(astuple(units)) == len(names)
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
    reference = statistics.median(float(m["rate"]) for _, m in mine)
    memory = fit_memory([(one, m["peak_bytes"]) for one, m in mine])
    return {**memory, **fit_time([(one, m["seconds"], m["rate"]) for one, m in mine], reference), "rate": reference}


if __name__ == "__main__":
    main()
