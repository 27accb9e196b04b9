"""`klimb.compare` and `klimb compare`: from a config or finished runs to a table, files and sentences."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klimb.comparison.arms import SEED, Arm, arms_between, arms_of, by_value, check_arms, shown
from klimb.comparison.page import build_page
from klimb.comparison.picture import draw
from klimb.comparison.runs import ArmRun, Say, comparison_folder, plan_runs, run_all
from klimb.comparison.table import KL, REWARD, ArmRows, TableRow, csv_rows, table
from klimb.comparison.verdict import verdict
from klimb.config.guard import flat
from klimb.config.load import load_config
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig, VaryConfig
from klimb.errors import ConfigError, MissingExtra
from klimb.report.files import read_run


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """folder of the files; arms with their rows; implied: key -> label -> value, what differs beside the varied keys;
    rows of the table; sentences the numbers support; finished: False when somebody stopped it."""

    folder: Path
    title: str
    arms: Sequence[ArmRows]
    varied: Sequence[str]
    implied: Mapping[str, Mapping[str, str]]
    every: int
    rows: Sequence[TableRow]
    sentences: Sequence[str]
    finished: bool

    def cells(self) -> list[list[str]]:
        """The table as text, its header first: KL of every arm, then reward of every arm."""
        labels = [arm.label for arm in self.arms]
        columns = [(metric, label) for metric in FORMS for label in labels]
        head = ["step", *(f"{FORMS[metric][0]}, {label}" for metric, label in columns)]
        body = [
            ["start" if r.step == 0 else str(r.step), *(_text(r, m, label) for m, label in columns)] for r in self.rows
        ]
        return [head, *body]


FORMS = {KL: ("KL", ".4f"), REWARD: ("reward", ".3f")}


def _text(row: TableRow, metric: str, label: str) -> str:
    value = row.values[label][metric]
    return "-" if math.isnan(value.mean) else value.shown(FORMS[metric][1])


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the command line adds to a config's own `compare` section; None: as the config says."""

    vary: Sequence[VaryConfig] = ()
    every: int | None = None
    seeds: int | None = None
    steps: int | None = None
    with_advice: bool = False


def compare(path: str | Path, overrides: Sequence[str] = (), wish: Wish | None = None, say: Say = print) -> Comparison:
    """Run every arm of a config, or go on with them, and write compare.csv, .png and .html.

    Raises ConfigError where arms would differ in more than they should, before anything runs.
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
    folder = comparison_folder(arms, path.stem)
    runs = plan_runs(arms, own.seeds if wish.seeds is None else wish.seeds, folder)
    varied = [item.key for item in vary]
    say(_opening(arms, varied, len(runs), folder))
    finished = run_all(runs, say)
    every = own.every if wish.every is None else wish.every
    started = [run for run in runs if (run.folder / "metrics.jsonl").is_file()]
    return assemble(folder, path.stem, varied, started, every, finished)


def compare_runs(folders: Sequence[Path], out: Path | None, wish: Wish) -> Comparison:
    """The same over run folders that are there already. Raises ConfigError when they differ in more than one key."""
    _require_extras()
    configs = {str(folder): load_config(folder / "config.yaml").config for folder in folders}
    if len(configs) < 2:
        raise ConfigError(f"{folders[0]}: one run makes no comparison; give two or more run folders, or a config file")
    arms = arms_between(configs, wish.with_advice)
    varied = list(next(iter(arms.values())).values)
    runs = [ArmRun(arm=arms[name], seed=config.training.seed, folder=Path(name)) for name, config in configs.items()]
    taken = dict[tuple[str, int], Path]()
    for run in runs:
        other = taken.setdefault((run.arm.label, run.seed), run.folder)
        if other != run.folder:
            raise ConfigError(f"{other} and {run.folder} are the same arm ({run.arm.label}) and seed; give one of them")
    names = "-".join(folder.resolve().name for folder in folders[:2])
    target = folders[0].resolve().parent / f"compare-{names}" if out is None else out
    return assemble(target, names, varied, runs, 50 if wish.every is None else wish.every, True)


def _require_extras() -> None:
    """Before hours of training, not after."""
    for package in ("matplotlib", "plotly"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "report", "klimb compare")


def assemble(
    folder: Path, title: str, varied: Sequence[str], runs: Sequence[ArmRun], every: int, finished: bool
) -> Comparison:
    """Read the runs' files, compute, and write the comparison's own."""
    arms: dict[str, Arm] = {}
    for run in runs:
        arms.setdefault(run.arm.label, run.arm)
    rows = [_arm_rows(arm, [run for run in runs if run.arm.label == label]) for label, arm in arms.items()]
    flats = {label: flat(arm.config) for label, arm in arms.items()}
    configs: dict[str, RunConfig] = {label: arm.config for label, arm in arms.items()}
    beside = check_arms(configs, varied, {"training.lr", SEED}) if len(configs) > 1 else []
    done = Comparison(
        folder=folder,
        title=title,
        arms=rows,
        varied=varied,
        implied={key: {label: shown(one.get(key)) for label, one in flats.items()} for key in beside if key != SEED},
        every=every,
        rows=table(rows, every),
        sentences=verdict(rows),
        finished=finished,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(done, folder / "compare.csv")
    draw(done, folder / "compare.png")
    (folder / "compare.html").write_text(build_page(done), encoding="utf-8")
    return done


def _arm_rows(arm: Arm, runs: Sequence[ArmRun]) -> ArmRows:
    posture = resolve(arm.config)
    steered = posture.needs_reference and posture.kl_type != "fixed"
    return ArmRows(
        label=arm.label,
        runs={run.seed: read_run(run.folder).rows for run in runs},
        target=arm.config.algorithm.kl_ctrl.target_kl if steered else None,
    )


def _opening(arms: Sequence[Arm], varied: Sequence[str], runs: int, folder: Path) -> str:
    """What differs, before anything runs."""
    lines = [f"comparison of {len(arms)} arms in {runs} runs, one after the other, in {folder}"]
    lines += [f"  {arm.label}" for arm in arms]
    beside = check_arms({arm.label: arm.config for arm in arms}, varied, {"training.lr"})
    if beside:
        lines.append("what goes with it:")
        flats = {arm.label: flat(arm.config) for arm in arms}
        lines += [f"  {key}: {by_value({name: shown(one.get(key)) for name, one in flats.items()})}" for key in beside]
    lines.append("everything else is the same: data order, seeds, every other key")
    return "\n".join(lines)


def write_csv(done: Comparison, path: Path) -> None:
    rows = csv_rows(done.arms, done.every, ("kl/k3", "reward/mean", "kl/coef", "policy/entropy", "length/mean"))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["step", "arm", "seed"])
        writer.writeheader()
        writer.writerows(
            {k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows
        )
