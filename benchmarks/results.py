"""Print the table of docs/results.md from run folders: one line per run, from the runs' own files.

python benchmarks/results.py runs/quickstart runs/quickstart-seed1 ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml


def line(folder: Path) -> str:
    """One row of the table: held-out before and after, KL of the second half, times."""
    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    rows: list[dict[str, Any]] = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    evals = [row for row in rows if "eval/accuracy" in row]
    phases = [row for row in rows if row["step"] > 0]
    kls = [row["kl/k3"] for row in phases if "kl/k3" in row]
    half = kls[len(kls) // 2 :]
    kl = sum(half) / len(half) if half else float("nan")
    control = config["algorithm"]["kl_ctrl"]
    target = f"{control['target_kl']:g}" if control["type"] == "adaptive" else "fixed"
    minutes = sum(row["time/step"] for row in rows) / 60
    cells = [
        folder.name,
        "explicit" if config["algorithm"]["use_pf_ppo"] else "cached",
        config["algorithm"]["adv_estimator"],
        str(config["training"]["seed"]),
        f"{int(phases[-1]['episodes']):,}",
        f"{evals[0]['eval/accuracy']:.1%}",
        f"{evals[-1]['eval/accuracy']:.1%}",
        f"{100 * (evals[-1]['eval/accuracy'] - evals[0]['eval/accuracy']):+.1f}",
        f"{kl:.4f}",
        target,
        f"{minutes:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    names = [
        "run",
        "posture",
        "estimator",
        "seed",
        "episodes",
        "before",
        "after",
        "points",
        "KL, 2nd half",
        "target",
        "minutes",
    ]
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for folder in parser.parse_args().runs:
        print(line(folder))


if __name__ == "__main__":
    main()
