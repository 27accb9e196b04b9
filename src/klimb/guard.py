"""Back to a healthy state when a run breaks: restore, change one setting, skip the prompts that broke it, go on.

Healthy states are checkpoints, and between them snapshots in RUN/healthy, which lie on disk so that they cost no
memory. What was changed is part of the next checkpoint, so that a run that resumes has it too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from klimb import checkpoint, snapshot
from klimb.clock import Clock
from klimb.config.counts import count
from klimb.config.load import with_overrides
from klimb.config.posture import filled, resolve
from klimb.config.schema import RunConfig
from klimb.derive import actor_steps, make_controller, make_recipe, make_schedule, make_split
from klimb.doctor.finding import Facts, Finding
from klimb.ladder import Intervention, all_overrides, climb
from klimb.run import Run, renew_engine, run_parts
from klimb.runlog import json_line
from klimb.snapshot import State
from klimb.update import Trainable

KEPT = 3
"""Healthy snapshots before the newest checkpoint, beside that of the start, that a run which resumes may go back to."""
RECORD = "interventions.jsonl"


def facts_of(config: RunConfig) -> Facts:
    """What the doctor may know of a run."""
    return Facts.of(filled(config, resolve(config)).model_dump(mode="json"))


def is_on(run: Run) -> bool:
    return run.config.diagnostics.on_alarm == "rollback"


def keep_if_healthy(run: Run, state: State, row: Mapping[str, float], findings: Sequence[Finding]) -> None:
    """A snapshot when one is due and nothing that a rollback could cure is in sight."""
    folder, every = run.folder / "healthy", run.config.diagnostics.healthy_every_phases
    if not is_on(run) or state.step % every or not run.watch.is_calm(findings):
        return
    checkpoint.write(folder, state.step, lambda place: snapshot.fill(place, run_parts(run), state, row), run.ranks)
    run.ranks.first(lambda: _prune(run))


def _prune(run: Run) -> None:
    saved = checkpoint.listed(run.folder / "checkpoints")
    newest = (checkpoint.step_of(saved[-1]) or 0) if saved else 0
    # A run that resumes from the newest checkpoint must find those that a run without a stop would have there.
    kept = checkpoint.listed(run.folder / "healthy")[1:]
    for path in [p for p in kept if (checkpoint.step_of(p) or 0) <= newest][:-KEPT]:
        shutil.rmtree(path)


def begin(run: Run, state: State, row: Mapping[str, float]) -> None:
    """A run that goes on with the guard newly switched on has one state to go back to: this one."""
    if is_on(run) and state.step and run.ranks.first(lambda: not checkpoint.listed(run.folder / "healthy")):
        folder = run.folder / "healthy"
        checkpoint.write(folder, state.step, lambda place: snapshot.fill(place, run_parts(run), state, row), run.ranks)


def forget(run: Run, beyond: int) -> None:
    """Remove the snapshots beyond a step: they are of a path not taken, or the run is over (-1)."""
    run.ranks.first(lambda: _forget(run.folder / "healthy", beyond))


def _forget(folder: Path, beyond: int) -> None:
    checkpoint.clean(folder)
    for path in checkpoint.listed(folder):
        if (checkpoint.step_of(path) or 0) > beyond:
            shutil.rmtree(path)
    if beyond < 0:
        shutil.rmtree(folder, ignore_errors=True)


def roll_back(run: Run, state: State, alarms: Sequence[Finding]) -> tuple[Run, State] | None:
    """None when no intervention is left, or no state from before the alarm.

    A kill at any line leaves a folder from which the run walks the same path: newer checkpoints go, newest first, then
    the restored state is saved with what was changed, and only then is the log cut back to it.
    """
    alarm = min(alarms, key=lambda f: (f.since, f.named))
    source = run.ranks.first(lambda: _source(run, alarm))
    if source is None or len(state.interventions) >= run.config.diagnostics.max_interventions:
        return None
    moved_on = run.prompts.state_dict()
    restored = snapshot.restore(source, run_parts(run))
    run.prompts.load_state_dict(moved_on)  # what was drawn since then is skipped: the batch that broke it is in there
    raised = any(i.rung == "kl" for i in state.interventions[len(restored.state.interventions) :])
    coef = run.posture.init_kl_coef if raised else run.controller.coef
    rung, overrides = climb(run.config, coef, state.interventions, state.step)
    intervention = Intervention(
        number=len(state.interventions) + 1,
        finding=alarm.code,
        evidence=alarm.evidence,
        step=state.step,
        first=alarm.since,
        back_to=restored.state.step,
        rung=rung,
        overrides=overrides,
        episodes_lost=state.episodes - restored.state.episodes,
    )
    back = replace(restored.state, interventions=(*state.interventions, intervention))
    of_source = with_overrides(run.base_config, all_overrides(restored.state.interventions))
    run = retuned(run, of_source, with_overrides(run.config, overrides), raised or rung == "kl")
    renew_engine(run, back.step, Clock(run.roles.actor.device))
    run.log.set_aside(restored.offsets, f"abandoned-{intervention.number}")
    back = _save(run, back, restored)
    forget(run, back.step)
    run.ranks.first(lambda: _cut_back(run, restored.offsets, back))
    run.watch.remember(run.log.rows(), facts_of(run.config))
    run.screen.warn(said(intervention))
    return run, back


def _cut_back(run: Run, offsets: Mapping[str, int], back: State) -> None:
    run.log.rewind(offsets, back.step)
    write_record(run.folder, back)


def _save(run: Run, back: State, restored: snapshot.Restored) -> State:
    """The restored state as the newest checkpoint, its log offsets those of the source."""
    folder = run.folder / "checkpoints"
    run.ranks.first(lambda: checkpoint.set_aside(folder, back.step))
    listed = run.ranks.first(lambda: checkpoint.listed(folder))
    if back.best_step not in (None, back.step, *(checkpoint.step_of(path) for path in listed)):
        back = replace(back, best_step=None, best_value=None)  # a later best had taken its place, and went too
    parts = replace(run_parts(run), offsets=restored.offsets)
    checkpoint.write(folder, back.step, lambda place: snapshot.fill(place, parts, back, restored.metrics), run.ranks)
    return back


def said(intervention: Intervention) -> str:
    i = intervention
    return (
        f"intervention {i.number}: {i.finding} ({i.evidence}). Back to step {i.back_to}, "
        f"{i.episodes_lost:,} episodes thrown away, now with {' '.join(i.overrides)}"
    )


def write_record(folder: Path, state: State) -> None:
    """interventions.jsonl, from what the state holds."""
    if not state.interventions:
        (folder / RECORD).unlink(missing_ok=True)
        return
    lines = (json_line(json.loads(json.dumps(asdict(i)))) for i in state.interventions)
    (folder / RECORD).write_text("".join(lines), encoding="utf-8")


def _source(run: Run, alarm: Finding) -> Path | None:
    """The newest whole snapshot from before the alarm's state began.

    Snapshots alone: the run takes them at steps of its own, while a checkpoint may be there because somebody pressed
    Ctrl-C. Where the state began so long ago that only the start is older, the oldest of the others: it was calm then.
    """
    kept = [path for path in checkpoint.listed(run.folder / "healthy") if checkpoint.damage(path) is None]
    before = [path for path in kept if (checkpoint.step_of(path) or 0) < alarm.since]
    lately = alarm.since <= run.config.diagnostics.healthy_every_phases
    if len(before) == 1 and len(kept) > 1 and not lately:
        return kept[1]
    return before[-1] if before else None


def retuned(run: Run, before: RunConfig, config: RunConfig, new_coef: bool) -> Run:
    """The run with other settings: its models, optimizers, data and log stay. before: the settings under which its
    optimizer steps were counted; new_coef: the controller starts from the config's coefficient."""
    posture = resolve(config)
    counts = count(config, posture, len(run.prompts))
    was, now = count(before, resolve(before), len(run.prompts)).optimizer_steps, counts.optimizer_steps
    _reschedule(run.actor, was, now, config, actor_steps(config, counts), posture.lr)
    if run.critic is not None:
        _reschedule(run.critic, was, now, config, counts.optimizer_steps, config.critic.lr)
    temperature = config.actor_rollout_ref.temperature
    return replace(
        run,
        config=config,
        posture=posture,
        counts=counts,
        recipe=make_recipe(config, posture, run.recipe.dtype),
        split=make_split(config, counts),
        sampling=replace(run.sampling, temperature=temperature),
        controller=make_controller(config, posture) if new_coef else run.controller,
    )


def _reschedule(trainable: Trainable, was: int, now: int, config: RunConfig, steps: int, peak: float) -> None:
    """Another peak, and where a phase has fewer steps than before, the same share of the schedule done."""
    trainable.schedule = make_schedule(config, steps, peak)
    trainable.steps = trainable.steps if was == now else round(trainable.steps * now / was)
