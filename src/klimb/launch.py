"""`klimb.train` and `klimb.evaluate`: from a config to a run folder and a result."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from klimb import checkpoint, guard, loop, snapshot
from klimb.build import (
    build_components,
    build_run,
    load_data,
    load_policy,
    make_pool,
    pick_device,
    pick_dtype,
    reward_settings,
    samplings,
    slots,
)
from klimb.clock import Exhausted, memory_limit
from klimb.config.guard import refuse_other_kind
from klimb.config.load import dump_config
from klimb.config.paths import NO_EVAL, check_runnable, make_folder, missing_model, model_folder
from klimb.config.posture import filled, resolve
from klimb.config.schema import RunConfig
from klimb.console import Screen
from klimb.doctor.finding import Finding
from klimb.errors import CheckpointError, ConfigError, KlimbError
from klimb.evaluation import EvalResult, run_eval
from klimb.exhaustion import OutOfMemory, Words, explain, left_behind, obituary
from klimb.ladder import Intervention
from klimb.malloc import is_exhausted
from klimb.models.load import load_causal_lm, load_tokenizer
from klimb.outlook import Outlook, expect, largest_peaks, look_back
from klimb.processes import Start, as_started, is_rank, joined
from klimb.processes import start as start_ranks
from klimb.ranks import Ranks
from klimb.reward.workers import WorkerPool
from klimb.rollout.hf import HFSampler
from klimb.run import Run, run_parts
from klimb.snapshot import State


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """folder of the run; step and episodes reached; finished: False when somebody stopped it early.

    before, after: the held-out metrics (eval/*) at the first and the last evaluation, empty without held-out prompts.
    kl: mean kl/k3 over the second half of the phases, None without KL. best: checkpoint with the best evaluation.
    alarms: findings of the doctor that ended the run (diagnostics.on_alarm). interventions: what the guard changed.
    outlook: what was estimated of memory and time beside what was measured, None where nothing can be said.
    """

    folder: Path
    step: int
    episodes: int
    finished: bool
    before: Mapping[str, float]
    after: Mapping[str, float]
    kl: float | None
    best: Path | None
    alarms: tuple[Finding, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    outlook: Outlook | None = None


def train(config: RunConfig, recipe: str = "run", screen: Screen | None = None) -> RunResult:
    """Run the config to its end, or on from its newest checkpoint. recipe: the first part of a folder's default name.

    With training.trainer fsdp in ranks of its own, or as one of the ranks where torchrun or Ray started this process.
    Raises KlimbError for everything that is the user's to mend, before any episode is sampled where that can be known.
    """
    _refuse_bootstrapping()
    config = as_started(config)
    check_runnable(config)
    t, cluster = config.training, config.cluster
    if t.trainer == "single" or is_rank():
        with joined(config) as ranks:
            folder, start = ranks.first(lambda: place(config, recipe))
            return _train(config, folder, start, screen, ranks)
    folder, start = place(config, recipe)
    if cluster.kind == "local":
        return start_ranks(_train_rank, (config, folder, start), t.num_processes, cluster.max_restarts)
    from klimb.cluster import run_on_ray

    return run_on_ray(_train_rank, (config, folder.resolve(), start), t.num_processes, cluster, folder)


def _train_rank(config: RunConfig, folder: Path, start: Path | None, told: Start) -> RunResult:
    """One rank's part. Started again, it goes on from the newest checkpoint of the folder."""
    with joined(config, told.stop) as ranks:
        return _train(config, folder, None if told.again else start, None, ranks)


def _train(config: RunConfig, folder: Path, start: Path | None, screen: Screen | None, ranks: Ranks) -> RunResult:
    shown = screen or (Screen() if ranks.is_first else Screen(Console(quiet=True)))
    with shown, _alone_in(folder, ranks), make_pool(config) as pool:
        start = ranks.first(lambda: _find_start(config, folder, start, shown))
        words = left_behind(folder)
        run = _built(config, folder, shown, pool, start, ranks)
        try:
            _mourn(run, words)
            state = _begin(run, start)
            shown.begin(f"klimb: {folder}", run.counts.episodes, state.episodes)
            before, state = state, loop.train(run, state)
            if state.episodes >= run.counts.episodes and not run.watch.stopped:
                guard.forget(run, -1)
            outlook = look_back(run, [row for row in run.log.rows() if row["step"] > before.step])
        except Exhausted as error:
            raise OutOfMemory(_explained(run, error)) from error
        finally:
            run.last_words.end()
            run.log.close()
            run.sampler.close()
            for component in run.components:
                component.close()
    return replace(summarise(folder, state, run.counts.episodes, run.watch.stopped), outlook=outlook)


@contextmanager
def _alone_in(folder: Path, ranks: Ranks) -> Generator[None]:
    """Hold the run folder: two processes in one would cut each other's logs and remove each other's saves.

    The lock goes with the process, however it ends.
    """
    make_folder(folder)
    with (folder / ".lock").open("a") as file:
        ranks.first(lambda: _lock(folder, file))
        yield


def _lock(folder: Path, file: TextIO) -> None:
    # A report looks for a moment whether the lock is held, by holding it: ask more than once.
    if not any(_locked(file) or time.sleep(0.1) for _ in range(5)):
        raise KlimbError(
            f"{folder}: another klimb process is running in this folder. Wait for it, stop it, or give this run a "
            "folder of its own with run.name=NEW_NAME"
        )


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _refuse_bootstrapping() -> None:
    """A reward worker that imports a script without a main guard would run the script's training a second time."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise KlimbError(
            "klimb was called while a worker process imports your script, so the run would start inside itself. "
            'Put the call below: if __name__ == "__main__":'
        )


def place(config: RunConfig, recipe: str) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint to start from, or None for a start from nothing."""
    parent, resume = Path(config.run.dir), config.training.resume
    name = config.run.name or default_name(config, recipe)
    if resume not in ("auto", "never"):
        start = Path(resume)
        try:
            checkpoint.require_whole(start)
        except CheckpointError as error:
            words = "allowed: auto, never, or RUN/checkpoints/step-..."
            raise CheckpointError(f"training.resume={resume}: {error}; {words}") from None
        if start.parent.name != "checkpoints":
            raise CheckpointError(f"{start}: a checkpoint lies in RUN/checkpoints/; this one does not")
        if config.run.name is not None and config.run.name != start.resolve().parent.parent.name:
            raise CheckpointError(
                f"training.resume={start} goes on in its own run folder, {start.parent.parent}, but run.name is "
                f"{config.run.name}. Leave run.name out; to branch off, copy the run folder first"
            )
        return start.parent.parent, start
    folder = parent / name
    if resume == "never":
        taken = [folder, *(parent / f"{name}-{n}" for n in range(2, 10_000))]
        return next(path for path in taken if not path.exists()), None
    return folder, None


def default_name(config: RunConfig, recipe: str) -> str:
    """Recipe, posture and a hash of everything that changes numbers: the same command finds its folder again."""
    tree = filled(config, resolve(config)).model_dump(mode="json")
    for section in ("run", "logging", "compare", "cluster"):
        del tree[section]
    for key in ("resume", "keep_checkpoints"):
        del tree["training"][key]
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:6]
    return f"{recipe}-{resolve(config).name}-{digest}"


def _find_start(config: RunConfig, folder: Path, start: Path | None, screen: Screen) -> Path | None:
    """The checkpoint to go on from, checked to be of this kind of run before any model is loaded."""
    checkpoint.clean(folder / "checkpoints")
    warnings: list[str] = []
    if start is None:
        start, warnings = checkpoint.newest(folder / "checkpoints")
        if start is None and warnings:  # a start from nothing would cut the run's log files to nothing
            raise CheckpointError(
                "\n".join(warnings) + f"\nNo checkpoint in {folder} is whole, so there is nothing to go on from. Start "
                "a new run beside it with training.resume=never, or put a whole checkpoint there"
            )
    if start is not None:
        warnings += refuse_other_kind(_recorded_config(start), config, start)
    elif (folder / "metrics.jsonl").exists():
        warnings += _refuse_foreign_folder(config, folder)
    for warning in warnings:
        screen.warn(warning)
    return start


def _built(config: RunConfig, folder: Path, screen: Screen, pool: WorkerPool, start: Path | None, ranks: Ranks) -> Run:
    try:
        return build_run(config, folder, screen, pool, snapshot.read_interventions(start), ranks)
    except (MemoryError, RuntimeError) as error:
        if not is_exhausted(error):
            raise
        device, facts = pick_device(), guard.facts_of(config)
        raise OutOfMemory(explain("loading", {}, memory_limit(device), facts)) from error


def _explained(run: Run, error: Exhausted) -> str:
    rows = run.log.rows()
    logged = largest_peaks(rows)
    peaks = logged | {name: max(size, logged.get(name, 0.0)) for name, size in error.peaks.items()}
    expected = expect(run, [row for row in rows if "length/mean" in row])
    limit, facts = memory_limit(run.roles.actor.device), run.watch.facts
    return explain(error.part, peaks, limit, facts, () if expected is None else expected.peaks)


def _mourn(run: Run, words: Words | None) -> None:
    """Say what became of a process that was killed in this folder; its log still has all of its steps."""
    if words is None:
        return
    text = obituary(words, largest_peaks(run.log.rows()), memory_limit(run.roles.actor.device), run.watch.facts)
    if text is not None:
        run.screen.warn(text)


def _begin(run: Run, start: Path | None) -> State:
    """Restore the checkpoint, or start from nothing; log files are cut back to that point."""
    state, offsets, metrics = State(), dict[str, int](), dict[str, float]()
    if start is not None:
        restored = snapshot.restore(start, run_parts(run))
        state, offsets, metrics = restored.state, restored.offsets, restored.metrics
        for text in restored.warnings:
            run.screen.warn(text)
        for text in run.ranks.first(lambda: checkpoint.set_aside(run.folder / "checkpoints", state.step)):
            run.screen.warn(text)
        run.screen.say(
            f"resuming from {start}: step {state.step}, {state.episodes:,} of {run.counts.episodes:,} episodes"
        )
    guard.forget(run, state.step if start is not None else -1)
    run.ranks.first(lambda: _begin_files(run, state, offsets))
    run.watch.remember(run.log.rows(), run.watch.facts)
    guard.begin(run, state, metrics)
    return state


def _begin_files(run: Run, state: State, offsets: Mapping[str, int]) -> None:
    run.log.begin(offsets, state.step)
    guard.write_record(run.folder, state)
    complete = filled(run.base_config, resolve(run.base_config))
    text = dump_config(complete.model_dump(mode="json"))
    (run.folder / "config.yaml").write_text(text, encoding="utf-8")


def _recorded_config(start: Path) -> RunConfig:
    """The config a checkpoint was written with. CheckpointError when this version cannot read it."""
    record = snapshot.read_record(start)
    try:
        return RunConfig.model_validate_json(json.dumps(record["config"]))
    except (KeyError, ValidationError) as error:
        version = record.get("versions", {}).get("klimb", "unknown")
        raise CheckpointError(
            f"{start}: its config cannot be read by this version of klimb (it was written by {version}): "
            f"{str(error).splitlines()[0]}. Resume with that version, or start anew with training.resume=never"
        ) from None


def _refuse_foreign_folder(config: RunConfig, folder: Path) -> list[str]:
    """No checkpoint yet, but a log: the same run killed early may start anew, another one must not overwrite it."""
    try:
        before = RunConfig.load(folder / "config.yaml")
    except ConfigError:
        return []
    return refuse_other_kind(before, config, folder)


def summarise(folder: Path, state: State, episodes: int, stopped: tuple[Finding, ...] = ()) -> RunResult:
    """What the run's own files say."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    evals = {
        row["step"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in rows if "eval/reward" in row
    }
    last = max(evals, default=0)
    kls = [row["kl/k3"] for row in rows if isinstance(row.get("kl/k3"), float) and math.isfinite(row["kl/k3"])]
    half = kls[len(kls) // 2 :]
    best = None if state.best_step is None else folder / "checkpoints" / checkpoint.checkpoint_name(state.best_step)
    return RunResult(
        folder=folder,
        step=state.step,
        episodes=state.episodes,
        finished=state.episodes >= episodes and not stopped,
        before=evals.get(0, {}),
        after=evals[last] if last > 0 else {},
        kl=sum(half) / len(half) if half else None,
        best=best,
        alarms=stopped,
        interventions=state.interventions,
    )


def evaluate(config: RunConfig, model: Path | None = None, screen: Screen | None = None) -> EvalResult:
    """Score a model on the config's held-out prompts. model: a folder; None: the config's own model_path."""
    _refuse_bootstrapping()
    if not config.data.eval_files:
        raise ConfigError(NO_EVAL)
    folder = model or model_folder(config.actor_rollout_ref.model_path)
    trust, device, shown = config.actor_rollout_ref.trust_remote_code, pick_device(), screen or Screen()
    if (text := missing_model("model", str(folder))) is not None:
        raise ConfigError(text)
    tokenizer = load_tokenizer(folder, trust)
    data = load_data(config, tokenizer, shown, train=False)
    with make_pool(config) as pool, Progress(console=shown.console, transient=True) as bar:
        components = build_components(config, pool, tokenizer, device)
        actor = load_policy(config, folder, device) if model is None else load_causal_lm(folder, trust, device)
        task = bar.add_task("evaluating", total=len(data.eval) * config.eval.samples_per_prompt)
        result = run_eval(
            HFSampler(actor, tokenizer, slots(config, device), pick_dtype(config.training.dtype, device)),
            data.eval,
            config.eval.samples_per_prompt,
            samplings(config, actor, tokenizer)[1],
            components,
            reward_settings(config, resolve(config)),
            config.training.seed,
            lambda done, total: bar.update(task, completed=done),
        )
        for component in components:
            component.close()
    shown.failures(result.messages)
    return result
