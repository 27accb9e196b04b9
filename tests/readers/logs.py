"""Logs as verl, TRL and OpenRLHF write them, of a run that is sound or whose KL explodes at step 20."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 40


def verl_row(step: int, kl: float, rng: np.random.Generator) -> dict[str, float]:
    noise = float(rng.standard_normal())
    return {
        "training/global_step": step,
        "training/epoch": 0,
        "actor/entropy": 0.4 - 0.002 * step,
        "actor/kl_loss": kl,
        "actor/kl_coef": 0.001,
        "actor/pg_loss": 0.01 * noise,
        "actor/pg_clipfrac": 0.002,
        "actor/ppo_kl": 0.0002,
        "actor/grad_norm": 0.3,
        "actor/lr": 1e-6,
        "actor/perf/max_memory_allocated_gb": 40.5,
        "critic/score/mean": 0.3 + 0.01 * step + 0.01 * noise,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/advantages/mean": 0.0,
        "response_length/mean": 300.0 + noise,
        "response_length/clip_ratio": 0.02,
        "training/rollout_probs_diff_mean": 0.002,
        "timing_s/step": 61.0,
        "perf/throughput": 1234.5,
    } | ({"val-core/openai/gsm8k/acc/mean@1": 0.4 + 0.004 * step} if step % 10 == 0 else {})


def trl_row(step: int, kl: float, rng: np.random.Generator) -> dict[str, float]:
    noise = float(rng.standard_normal())
    return {
        "loss": 0.01 * noise,
        "grad_norm": 0.4,
        "learning_rate": 1e-6,
        "num_tokens": 1000.0 * step,
        "completions/mean_length": 200.0 + noise,
        "completions/clipped_ratio": 0.01,
        "rewards/accuracy/mean": 0.3,
        "reward": 0.3 + 0.01 * step + 0.02 * noise,
        "reward_std": 0.4,
        "frac_reward_zero_std": 0.1,
        "kl": kl,
        "entropy": 0.5,
        "clip_ratio/region_mean": 0.003,
        "epoch": 0.01 * step,
        "step": step,
    }


def openrlhf_row(step: int, kl: float, rng: np.random.Generator) -> dict[str, float]:
    noise = float(rng.standard_normal())
    return {
        "train/policy_loss": 0.01 * noise,
        "train/critic_loss": 0.1,
        "train/kl": kl,
        "train/reward": 0.2 + 0.01 * step,
        "train/return": 0.2,
        "train/response_length": 150.0,
        "train/total_length": 190.0,
        "train/ppo_clip_ratio": 0.002,
        "train/ppo_kl": 0.0003,
        "train/vllm_kl": 0.0004,
        "train/actor_lr": 5e-7,
        "train/global_step": step,
    }


ROWS: dict[str, Callable[[int, float, np.random.Generator], dict[str, float]]] = {
    "verl": verl_row,
    "trl": trl_row,
    "openrlhf": openrlhf_row,
}


def rows(source: str, spoiled: bool, steps: int = STEPS) -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    make = ROWS[source]
    return [make(step, 2.0 if spoiled and step >= 20 else 0.001 * step, rng) for step in range(1, steps + 1)]


def write_jsonl(path: Path, table: list[dict[str, Any]], nested: bool = False) -> Path:
    """nested: step beside data, as verl's file logger writes."""
    with path.open("w") as file:
        for row in table:
            shown = {"step": row["training/global_step"], "data": row} if nested else row
            file.write(json.dumps(shown) + "\n")
    return path


def write_csv(path: Path, table: list[dict[str, Any]], run: str = "") -> Path:
    """run: the name that a W&B export puts before each column, with __MIN and __MAX twins."""
    names = list(dict.fromkeys(name for row in table for name in row))
    if run:
        names = [n for n in names if "step" not in n]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        head = [f"{run} - {n}{end}" for n in names for end in ("", "__MIN", "__MAX")] if run else names
        writer.writerow(["Step", *head] if run else head)
        for number, row in enumerate(table, start=1):
            cells = [row.get(n, "") for n in names for _ in range(3 if run else 1)]
            writer.writerow([number, *cells] if run else cells)
    return path


def write_events(folder: Path, table: list[dict[str, Any]]) -> Path:
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(str(folder))
    for number, row in enumerate(table, start=1):
        for name, value in row.items():
            writer.add_scalar(name, value, number)
    writer.close()
    return folder


def write_state(path: Path, table: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"global_step": len(table), "log_history": table}))
    return path
