"""Run folders made by hand, as `klimb train` writes them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

CONFIG = """\
actor_rollout_ref: {model_path: playground:sft}
algorithm:
  use_pf_ppo: true
  adv_estimator: gae
  policy_loss: clip
  use_kl_in_reward: false
  use_kl_loss: true
  kl_ctrl: {type: adaptive, target_kl: 0.02}
data: {train_files: ["task:arithmetic"]}
training: {total_episodes: EPISODES, total_epochs: null}
eval: {metric: accuracy}
run: {name: NAME}
"""


def rows_of(steps: int, every: int = 10, seed: int = 0) -> list[dict[str, Any]]:
    """The log of a run that learns, its evaluation before training first."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [{"step": 0, "episodes": 0, "eval/reward": 0.5, "eval/accuracy": 0.375}]
    for step in range(1, steps + 1):
        done = step / steps
        noise = rng.gauss
        times = {"rollout": 0.5, "reward": 0.01, "score": 0.4, "update": 0.8}
        row: dict[str, Any] = {
            "step": step,
            "episodes": 64 * step,
            "epoch": 64 * step / 20000,
            "lr": 1e-4 * (1 - done),
            "reward/mean": 0.9 - 0.4 * math.exp(-5 * done) + noise(0, 0.04),
            "length/mean": 45 + noise(0, 0.4),
            "length/max": float(rng.choice([47, 49, 57, 64])),
            "length/truncated": rng.choice([0.0, 0.0, 1 / 64]),
            "kl/k1": 0.035 + noise(0, 0.004),
            "kl/k3": 0.018 + noise(0, 0.004),
            "kl/coef": 0.05 + 0.02 * math.sin(6 * done),
            "kl/target": 0.02,
            "mismatch/probs_diff_mean": abs(noise(2e-8, 5e-9)),
            "mismatch/probs_diff_max": abs(noise(4e-6, 1e-6)),
            "mismatch/ess": 1.0,
            "policy/ratio_abs_dev": abs(noise(0.001, 0.0004)),
            "policy/ratio_abs_dev_max": abs(noise(0.4, 0.1)),
            "policy/clip_fraction_low": abs(noise(0.002, 0.001)),
            "policy/clip_fraction_high": abs(noise(0.001, 0.001)),
            "policy/entropy": 0.08 - 0.04 * done + noise(0, 0.002),
            "policy/grad_norm": abs(noise(0.8, 0.2)),
            "value/grad_norm": abs(noise(0.3, 0.1)),
            "value/explained_variance": 0.3 * done + noise(0, 0.05),
            "value/loss": abs(noise(0.009, 0.002)),
            "time/step": sum(times.values()),
            "perf/rollout_tokens_per_s": 6000 + noise(0, 600),
            "perf/update_tokens_per_s": 5000 + noise(0, 500),
            "perf/episodes_per_s": 38 + noise(0, 4),
        }
        row |= {f"time/{part}": abs(seconds * (1 + noise(0, 0.1))) for part, seconds in times.items()}
        row |= {f"memory/{part}_peak": 6e8 + noise(0, 1e7) for part in ("rollout", "score", "update")}
        if step % every == 0:
            row |= {"eval/reward": 0.5 + 0.36 * done, "eval/accuracy": 0.375 + 0.4 * done}
        rows.append(row)
    return rows


def sample(step: int, kind: str = "train", row: int = 0, **changed: Any) -> dict[str, Any]:
    base = {
        "step": step,
        "kind": kind,
        "row": row,
        "index": 0,
        "prompt": f"What is {100 + row} + 7?",
        "response": f"ones: {row % 10}+7\nanswer: {107 + row}",
        "answer": str(107 + row),
        "reward": 1.0,
        "parts": {"task": 1.0},
        "correct": True,
        "failure": None,
        "finish_reason": "stop",
        "num_tokens": 40 + row % 9,
    }
    return base | changed


def write_run(
    folder: Path,
    rows: list[dict[str, Any]],
    samples: list[dict[str, Any]] | None = None,
    name: str = "tidy",
    episodes: int | None = None,
) -> Path:
    """A finished run, unless it was to have more episodes."""
    folder.mkdir(parents=True, exist_ok=True)
    total = episodes or (rows[-1]["episodes"] if rows else 6400)
    text = CONFIG.replace("EPISODES", str(total)).replace("NAME", json.dumps(name))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    (folder / ".lock").touch()
    for file, items in (("metrics.jsonl", rows), ("samples.jsonl", samples or [])):
        (folder / file).write_text("".join(line(item) for item in items), encoding="utf-8")
    return folder


def line(item: dict[str, Any]) -> str:
    return json.dumps(item, ensure_ascii=False) + "\n"
