"""`klimb.compare` and `klimb compare`: from a config or finished runs to a table, files and sentences."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klimb.comparison.arms import LENGTH, LR, SEED, Arm, arms_between, arms_of, by_label, check_arms, shown
from klimb.comparison.page import build_page
from klimb.comparison.picture import draw
from klimb.comparison.runs import ArmRun, Say, comparison_folder, plan_runs, run_all
from klimb.comparison.side_by_side import Comparison
from klimb.comparison.table import WINDOW, ArmRows, csv_rows, table, whole_seeds
from klimb.comparison.verdict import verdict
from klimb.config.load import load_config
from klimb.config.paths import check_runnable
from klimb.config.posture import resolve
from klimb.config.schema import VaryConfig
from klimb.errors import ConfigError, KlimbError, MissingExtra
from klimb.report.files import read_run

CSV_METRICS = ("kl/k3", "reward/mean", "kl/coef", "policy/entropy", "length/mean")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line adds to a config's own `compare` section; None: as the config says."""

    vary: Sequence[VaryConfig] = ()
    every: int | None = None
    seeds: int | None = None
    steps: int | None = None
    with_advice: bool = False


def compare(
    path: str | Path, overrides: Sequence[str] = (), wish: Wish | None = None, say: Say = print
) -> Comparison | None:
    """Run every arm of a config, or go on with them, and write compare.csv, .png and .html. None: stopped before any
    arm had made a step.

    Raises ConfigError where arms would differ in more than they should or could not run, before anything runs.
    """
    _require_extras()
    path, wish = Path(path), wish or Wish()
    own = load_config(path, overrides).config.compare
    vary = wish.vary or own.vary
    if not vary:
        raise ConfigError(
            f"{path}: nothing is varied; say what, for example --vary algorithm.use_pf_ppo=true,false, or in the "
            "file, compare: {vary: [{key: algorithm.use_pf_ppo, values: [true, false]}]}"
        )
    arms = arms_of(path, overrides, vary, wish.steps, wish.with_advice)
    for arm in arms:
        check_runnable(arm.config)
    folder, every = comparison_folder(arms, path.stem), own.every if wish.every is None else wish.every
    runs = plan_runs(arms, own.seeds if wish.seeds is None else wish.seeds, folder)
    varied = [item.key for item in vary]
    say(_opening(arms, varied, len(runs), folder))
    try:
        run_all(runs, say)
    except KlimbError:
        assemble(folder, path.stem, varied, runs, every)  # what is there is not lost with the arm that failed
        raise
    return assemble(folder, path.stem, varied, runs, every)


def compare_runs(folders: Sequence[Path], out: Path | None, wish: Wish) -> Comparison | None:
    """The same over run folders that are there already. Raises ConfigError when they differ in more than one key."""
    _require_extras()
    configs = {str(folder): load_config(folder / "config.yaml").config for folder in folders}
    if len(configs) < 2:
        raise ConfigError(f"{folders[0]}: one run makes no comparison; give two or more run folders, or a config file")
    arms = arms_between(configs, wish.with_advice)
    runs = [ArmRun(arm=arms[name], seed=config.training.seed, folder=Path(name)) for name, config in configs.items()]
    taken: dict[tuple[str, int], Path] = {}
    for run in runs:
        other = taken.setdefault((run.arm.label, run.seed), run.folder)
        if other != run.folder:
            raise ConfigError(f"{other} and {run.folder} are the same arm ({run.arm.label}) and seed; give one of them")
    seeds = {label: {seed for name, seed in taken if name == label} for label, _ in taken}
    if not set.intersection(*seeds.values()):
        had = ", ".join(f"{sorted(found)} ({label})" for label, found in seeds.items())
        raise ConfigError(f"no seed was run in every arm: {had}; arms are compared seed by seed")
    varied = list(next(iter(arms.values())).values)
    names = "-".join(folder.resolve().name for folder in folders[:2])
    target = folders[0].resolve().parent / f"compare-{names}" if out is None else out
    return assemble(target, names, varied, runs, 50 if wish.every is None else wish.every)


def _require_extras() -> None:
    """Before hours of training, not after."""
    for package in ("matplotlib", "plotly"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "report", "klimb compare")


def assemble(folder: Path, title: str, varied: Sequence[str], runs: Sequence[ArmRun], every: int) -> Comparison | None:
    """Read the runs' files, compute, and write the comparison's own. None when no run has made a step."""
    started = [run for run in runs if (run.folder / "metrics.jsonl").is_file()]
    files = {run.folder: read_run(run.folder, samples=False) for run in started}
    started = [run for run in started if any(row["step"] > 0 for row in files[run.folder].rows)]
    if not started:
        return None
    arms = {run.arm.label: run.arm for run in started}
    every_seed = [
        _arm_rows(arm, {run.seed: files[run.folder].rows for run in started if run.arm.label == label})
        for label, arm in arms.items()
    ]
    rows, left_out = whole_seeds(every_seed)
    configs = {label: arm.config for label, arm in arms.items()}
    beside = [
        key for key in check_arms(configs, varied, {"training.lr", "training.total_episodes", SEED}) if key != SEED
    ]
    states = {run.folder.name: files[run.folder].state for run in started}
    notes = [f"{name}: {state}" for name, state in states.items() if state != "finished"]
    notes += [f"{run.folder.name}: {note}" for run in started for note in files[run.folder].notes]
    notes += [f"seed {seed} is left out: not every arm has come as far with it" for seed in left_out]
    width = min(WINDOW, every)
    done = Comparison(
        folder=folder,
        title=title,
        arms=rows,
        varied=varied,
        implied=by_label(configs, [key for key in beside if key != SEED]),
        every=every,
        rows=table(rows, every),
        sentences=verdict(rows, width),
        notes=notes,
        finished=len(started) == len(runs) and all(state == "finished" for state in states.values()),
    )
    _write(done)
    return done


def _write(done: Comparison) -> None:
    try:
        done.folder.mkdir(parents=True, exist_ok=True)
        _write_csv(done, done.folder / "compare.csv")
        draw(done, done.folder / "compare.png")
        (done.folder / "compare.html").write_text(build_page(done), encoding="utf-8")
    except OSError as error:
        raise KlimbError(
            f"{done.folder}: cannot be written: {error.strerror}; name another folder with --out"
        ) from None


def _arm_rows(arm: Arm, runs: dict[int, list[dict[str, float]]]) -> ArmRows:
    posture = resolve(arm.config)
    steered = posture.needs_reference and posture.kl_type != "fixed"
    return ArmRows(
        label=arm.label,
        runs=runs,
        target=arm.config.algorithm.kl_ctrl.target_kl if steered else None,
        values={key: shown(value) for key, value in arm.values.items()},
    )


def _opening(arms: Sequence[Arm], varied: Sequence[str], runs: int, folder: Path) -> str:
    """What differs, before anything runs."""
    configs = {arm.label: arm.config for arm in arms}
    lines = [f"comparison of {len(arms)} arms in {runs} runs, one after the other, in {folder}"]
    lines += [f"  {label}" for label in configs]
    beside = check_arms(configs, varied, {LR, LENGTH})
    if beside:
        lines += ["what goes with it:", *(f"  {line}" for line in by_label(configs, beside))]
    lines.append("everything else is the same: data order, seeds, every other key")
    if len({config.actor_rollout_ref.rollout_batch_size for config in configs.values()}) > 1:
        lines.append("a step has another number of episodes in each arm: rows of the table are equal in steps only")
    return "\n".join(lines)


def _write_csv(done: Comparison, path: Path) -> None:
    rows = csv_rows(done.arms, done.every, CSV_METRICS)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["step", "arm", "seed", *CSV_METRICS])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()})
