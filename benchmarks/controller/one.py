"""One real run of 150 phases for the controller's benchmark, and the queue that starts such runs.

python benchmarks/controller/one.py NAME '{"task": "arithmetic", "lr": 1e-4, "seed": 0, "control": {"type": "pi"}}'

Writes runs/controller/NAME/metrics.jsonl, and an empty file `done` beside it at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

RUNS = Path("runs/controller")
PHASES = 150
EPISODES = 32
TARGET = 0.02


def tree(name: str, setting: Mapping[str, Any]) -> dict[str, Any]:
    """The config of one run: PPO with a critic, explicit posture, KL in the loss, four optimizer steps a phase."""
    return {
        "actor_rollout_ref": {
            "model_path": "playground:sft",
            "rollout_batch_size": EPISODES,
            "temperature": 1.0,
            "max_tokens": 64 if setting["task"] == "arithmetic" else 96,
        },
        "algorithm": {
            "use_pf_ppo": True,
            "adv_estimator": "gae",
            "kl_ctrl": {"target_kl": TARGET, "init_kl_coef": 0.05, **setting["control"]},
        },
        "critic": {"lr": 1e-3},
        "reward_model": {"functions": [{"name": "task"}], "workers": 1},
        "data": {"train_files": [f"task:{setting['task']}"]},
        "training": {
            "micro_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "lr": setting["lr"],
            "lr_scheduler": "constant",
            "total_episodes": PHASES * EPISODES,
            "save_freq": PHASES * EPISODES,
            "seed": setting["seed"],
            "resume": "never",
        },
        "logging": {"tensorboard": False, "samples_per_phase": 0},
        "run": {"name": name, "dir": str(RUNS)},
    }


def run(name: str, setting: Mapping[str, Any]) -> None:
    """Run it to its end. `stairs` in the setting: coefficients, 25 phases each, instead of a controller."""
    from klimb import loop
    from klimb.build import build_run, make_pool
    from klimb.config.schema import RunConfig
    from klimb.console import Screen
    from klimb.snapshot import State

    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    config = RunConfig.model_validate(tree(name, setting))
    with Screen() as screen, make_pool(config) as pool:
        built = build_run(config, folder, screen, pool)
        if "stairs" in setting:
            built = replace(built, controller=Stairs(setting["stairs"]))
        built.log.begin({}, 0)
        screen.begin(name, built.counts.episodes, 0)
        loop.train(built, State())
        built.log.close()
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "done").touch()


class Stairs:
    """A coefficient that walks through the given ones, whatever is observed."""

    def __init__(self, coefs: list[float], phases: int = 25) -> None:
        self.coefs, self.phases, self.seen = coefs, phases, 0

    @property
    def coef(self) -> float:
        return self.coefs[min(self.seen // self.phases, len(self.coefs) - 1)]

    def update(self, kl: float, num_episodes: int) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "seen": float(self.seen)}

    def load_state_dict(self, d: Mapping[str, float]) -> None:
        self.seen = int(d["seen"])


def start_all(settings: Mapping[str, Mapping[str, Any]], jobs: int = 2) -> list[str]:
    """Every setting not yet done, `jobs` at once, one thread each. Returns the names of those that failed."""
    waiting = [name for name in settings if not (RUNS / name / "done").exists()]
    print(f"{len(settings) - len(waiting)} of {len(settings)} are done, {len(waiting)} to run", flush=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    begin, total, finished = time.monotonic(), len(waiting), 0
    RUNS.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            command = [sys.executable, __file__, name, json.dumps(settings[name])]
            with (RUNS / f"{name}.log").open("w") as log:
                running[name] = subprocess.Popen(
                    command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
                )
        time.sleep(0.5)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            code = running.pop(name).returncode
            finished += 1
            if code:
                failed.append(name)
            minutes = (time.monotonic() - begin) / 60
            left = minutes / finished * (total - finished)
            state = "done" if code == 0 else f"FAILED, see {RUNS / name}.log"
            print(f"{name}: {state} | {finished}/{total} | {minutes:.1f} min, {left:.1f} left", flush=True)
    return failed


def rows(name: str) -> list[dict[str, Any]]:
    """The logged rows of a finished run."""
    return [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]))
