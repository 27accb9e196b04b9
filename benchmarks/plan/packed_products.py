"""Bytes that oneDNN keeps for every size of a product on packed weights: KERNEL_BYTES of klimb.estimate.memory.

python benchmarks/plan/packed_products.py

Resident memory before and after one product of every row count from 1 to ROWS, for each of a few matrices.
"""

from __future__ import annotations

import torch
from torch import nn

from klimb.malloc import give_back
from klimb.models.prepacked import PackedLinear

ROWS = 64
SHAPES = ((192, 576), (192, 192), (192, 1024), (512, 192), (384, 2048), (1024, 384), (384, 640))
"""Matrices as they occur in cases.py, (in, out)."""


def resident() -> int:
    give_back()
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))


def main() -> None:
    torch.set_num_threads(1)
    found = list[float]()
    for width, out in SHAPES:
        packed = PackedLinear.of([nn.Linear(width, out, bias=False)], ROWS)
        packed(torch.ones(ROWS + 1, width))
        before = resident()
        for rows in range(1, ROWS + 1):
            packed(torch.ones(rows, width))
        found.append((resident() - before) / ROWS)
        print(f"{width} x {out}: {found[-1] / 1024:.0f} KiB a size")
    print(f"KERNEL_BYTES: {sum(found) / len(found):.4g}")


if __name__ == "__main__":
    main()
