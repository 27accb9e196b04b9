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

from klimb.comparison.arms import Arm
from klimb.config.guard import SILENT, differing, flat
from klimb.config.load import dump_config, load_config
from klimb.config.paths import make_folder
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError, KlimbError
from klimb.interrupt import handling
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

    @property
    def config(self) -> RunConfig:
        """The arm's, with this seed."""
        config = self.arm.config
        return config.model_copy(update={"training": config.training.model_copy(update={"seed": self.seed})})

    def is_done(self) -> bool:
        return (self.folder / "metrics.jsonl").is_file() and read_run(self.folder, samples=False).state == "finished"


def comparison_folder(arms: Sequence[Arm], recipe: str) -> Path:
    """The same command finds its folder again, also with more seeds."""
    config = arms[0].config
    if config.run.name is not None:
        return Path(config.run.dir) / f"compare-{config.run.name}"
    content = json.dumps([{k: v for k, v in flat(arm.config).items() if not k.startswith(SILENT)} for arm in arms])
    return Path(config.run.dir) / f"compare-{recipe}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"


def plan_runs(arms: Sequence[Arm], seeds: int, folder: Path) -> list[ArmRun]:
    """Seed by seed, so that a comparison that is stopped has whole pairs. Raises ConfigError where one of the folders
    holds a run of another config."""
    first = arms[0].config.training.seed
    runs = [
        ArmRun(arm=arm, seed=first + i, folder=folder / f"{arm.slug}-seed{first + i}")
        for i in range(seeds)
        for arm in arms
    ]
    for run in runs:
        _refuse_foreign(run)
    return runs


def _refuse_foreign(run: ArmRun) -> None:
    recorded = run.folder / "config.yaml"
    if not recorded.is_file():
        return
    changed = differing(flat(load_config(recorded).config), flat(run.config))
    if changed:
        raise ConfigError(
            f"{run.folder}: a run of another config lies there; it differs in {', '.join(changed)}. Give this "
            "comparison a folder of its own with run.name=NEW_NAME"
        )


def run_all(runs: Sequence[ArmRun], say: Say) -> None:
    """Start or go on with every run that is not done, in order, until somebody stops one.

    A process each: what one arm left in memory is no part of the next one's peak. Raises KlimbError when one fails.
    """
    waiting = [run for run in runs if not run.is_done()]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are done")
    begin = time.monotonic()
    for i, run in enumerate(waiting):
        left = f", about {(time.monotonic() - begin) / i / 60 * (len(waiting) - i):.0f} min left" if i else ""
        say(f"\nrun {len(runs) - len(waiting) + i + 1} of {len(runs)}: {run.arm.label}, seed {run.seed}{left}")
        code = _train(write_config(run))
        if code == STOPPED:
            return
        if code:
            raise KlimbError(
                f"{run.folder}: this arm ended with exit code {code}; its message stands above. Mend it and run the "
                "same command again: arms that are done stay done, this one goes on from its newest checkpoint"
            )


def write_config(run: ArmRun) -> Path:
    """The arm's own config file beside its folder: `klimb train` runs it alone, too."""
    tree = run.arm.config.model_dump(mode="json", exclude_unset=True, exclude={"compare"})
    tree["training"] = {**tree.get("training", {}), "seed": run.seed, "resume": "auto"}
    tree["run"] = {"dir": str(run.folder.parent), "name": run.folder.name}
    path = run.folder.with_name(f"{run.folder.name}.yaml")
    make_folder(path.parent)
    path.write_text(dump_config(tree), encoding="utf-8")
    return path


def _train(config: Path) -> int:
    """Exit code of `klimb train`; STOPPED when somebody asked it to stop, which it does after having saved.

    Ctrl-C and SIGTERM are handed on, once each. The arm has a session of its own, so that it does not get a terminal's
    Ctrl-C a second time: the second one means to stop without saving.
    """
    sys.stdout.flush()  # on a pipe, before what the arm prints
    asked: list[int] = []
    words = [sys.executable, "-m", "klimb", "train", str(config)]
    with subprocess.Popen(words, start_new_session=True) as arm:

        def hand_on(number: int, _: object) -> None:
            asked.append(number)
            arm.send_signal(number)

        with handling(hand_on):
            code = arm.wait()
    return STOPPED if asked else code
