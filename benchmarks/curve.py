"""Draw reward, held-out accuracy and KL of one run over episodes.

python benchmarks/curve.py runs/smollm2-arithmetic docs/smollm2-arithmetic.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = [json.loads(t) for t in (args.run / "metrics.jsonl").read_text().splitlines()]
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(2, 1))
    for key, label, style in (
        ("reward/mean", "training reward", "-"),
        ("eval/accuracy", "held-out accuracy", "o-"),
    ):
        points = [(row["episodes"], row[key]) for row in rows if key in row]
        top.plot(*zip(*points, strict=True), style, label=label)
    top.set_ylim(0, 1)
    top.legend()
    top.set_title(args.run.name)
    points = [(row["episodes"], row["kl/k3"]) for row in rows if "kl/k3" in row]
    bottom.plot(*zip(*points, strict=True), color="tab:green")
    bottom.set_ylabel("KL, nats per token")
    bottom.set_xlabel("episodes")
    figure.tight_layout()
    figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
