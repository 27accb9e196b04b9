"""Arms run one after the other, each in a process and a run folder of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from klimb.comparison.arms import Arm
from klimb.config.guard import SILENT, differing, flat
from klimb.config.load import load_config
from klimb.errors import KlimbError
from klimb.interrupt import Interrupt
from klimb.report.files import read_run

STOPPED = 130
"""Exit code of a run that somebody stopped, and that goes on with the same command."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm with one seed: where it runs."""

    arm: Arm
    seed: int
    folder: Path


def comparison_folder(arms: Sequence[Arm], recipe: str) -> Path:
    """The same command finds its folder again, also with more seeds; another length or another arm gets its own."""
    config = arms[0].config
    if config.run.name is not None:
        return Path(config.run.dir) / config.run.name
    content = json.dumps([{k: v for k, v in flat(arm.config).items() if not k.startswith(SILENT)} for arm in arms])
    return Path(config.run.dir) / f"compare-{recipe}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"


def plan_runs(arms: Sequence[Arm], seeds: int, folder: Path) -> list[ArmRun]:
    """Seed by seed, so that a comparison that is stopped has whole pairs."""
    first = arms[0].config.training.seed
    return [
        ArmRun(arm=arm, seed=first + i, folder=folder / f"{arm.slug}-seed{first + i}")
        for i in range(seeds)
        for arm in arms
    ]


def run_all(runs: Sequence[ArmRun], say: Say) -> bool:
    """Start or go on with every run, in order. False when somebody stopped one.

    A process each: what one arm left in memory is no part of the next one's peak. Raises KlimbError when one fails.
    """
    waiting = [run for run in runs if not is_done(run)]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are done")
    begin, total = time.monotonic(), len(runs)
    for done, run in enumerate(waiting):
        left = f", about {(time.monotonic() - begin) / done / 60 * (len(waiting) - done):.0f} min left" if done else ""
        say(f"\nrun {total - len(waiting) + done + 1} of {total}: {run.arm.label}, seed {run.seed}{left}")
        code = _train(write_config(run))
        if code == STOPPED:
            return False
        if code:
            raise KlimbError(
                f"{run.folder}: this arm ended with exit code {code}; its message stands above. Mend it and run the "
                "same command again: arms that are done stay done, this one goes on from its newest checkpoint"
            )
    return True


def is_done(run: ArmRun) -> bool:
    """Whether this run, of this very config, has reached its end."""
    if not (run.folder / "config.yaml").is_file() or read_run(run.folder).state != "finished":
        return False
    return not differing(
        flat(load_config(run.folder / "config.yaml").config), flat(load_config(write_config(run)).config)
    )


def _train(config: Path) -> int:
    """Exit code of `klimb train`. Ctrl-C reaches it too, from the terminal; this process waits until it has saved."""
    sys.stdout.flush()  # on a pipe, before what the arm prints
    interrupt = Interrupt(quiet=True)
    with interrupt.listening(), subprocess.Popen([sys.executable, "-m", "klimb", "train", str(config)]) as arm:
        code = arm.wait()
    return STOPPED if interrupt.asked else code


def write_config(run: ArmRun) -> Path:
    """The arm's own config file beside its folder: `klimb train` runs it alone, too."""
    tree = run.arm.config.model_dump(mode="json", exclude_unset=True, exclude={"compare"})
    tree["training"] = {**tree.get("training", {}), "seed": run.seed, "resume": "auto"}
    tree["run"] = {"dir": str(run.folder.parent), "name": run.folder.name}
    path = run.folder.with_name(f"{run.folder.name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path
