"""Golden run: a change that should not move a number shows the same rows.

`python -m tests.test_golden` records anew, and refuses a dirty tree: what moved a golden number belongs in a commit of
its own.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import klimb
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

VERSION = torch.__version__.split("+")[0]
FILE = Path(__file__).parent / "golden" / f"tiny-torch-{VERSION}.json"
KEYS = (
    *("reward/mean", "kl/k1", "kl/k3", "kl/coef", "policy/loss", "policy/kl_loss", "policy/grad_norm"),
    *("policy/entropy", "value/loss", "value/grad_norm", "advantage/std", "length/mean", "lr"),
)
CASES = {
    "ppo-explicit": {},
    "ppo-cached": {"algorithm.use_pf_ppo": False},
    "grpo-explicit": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollouts_per_prompt": 4},
}


def run(folder: Path, changes: dict[str, Any]) -> list[dict[str, float]]:
    write_inputs(folder / "inputs")
    model = build_tiny_model(folder / "model")
    always = {"training.total_episodes": 24, "data.eval_files": []}
    result = klimb.train(tiny_config(model, folder / "inputs", folder / "runs", **always, **changes))
    return [{key: row[key] for key in KEYS if key in row} for row in rows(result.folder)]


@pytest.mark.skipif(not FILE.exists(), reason=f"no golden rows recorded for torch {VERSION}")
@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    """Another processor rounds in other places, so digits are compared to 1e-4; here they are the same to the last."""
    expected = json.loads(FILE.read_text())[name]
    found = run(tmp_path, CASES[name])
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert math.isclose(ours[key], value, rel_tol=1e-4, abs_tol=1e-6), (key, ours[key], value)


def record() -> None:
    root = Path(__file__).parents[1]
    if subprocess.run(["git", "status", "--porcelain", "src"], cwd=root, capture_output=True, text=True).stdout:
        sys.exit("src/ has uncommitted changes; commit them before recording golden rows")
    torch.set_num_threads(1)
    golden = {}
    for name, changes in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            golden[name] = run(Path(folder), changes)
    FILE.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    record()
