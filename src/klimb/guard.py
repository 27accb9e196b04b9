"""Back to a healthy state when a run breaks: restore, change one setting, skip the prompts that broke it, go on.

Healthy states are checkpoints, and between them snapshots in RUN/healthy, which lie on disk so that they cost no
memory. What was changed is part of the next checkpoint, so that a run that resumes has it too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from klimb import checkpoint, snapshot
from klimb.config.counts import count
from klimb.config.load import with_overrides
from klimb.config.posture import filled, resolve
from klimb.config.schema import RunConfig
from klimb.derive import actor_steps, make_controller, make_recipe, make_schedule, make_split
from klimb.doctor.finding import Facts, Finding
from klimb.ladder import Intervention, all_overrides, climb
from klimb.run import Run, run_parts
from klimb.runlog import json_line
from klimb.snapshot import State
from klimb.update import Trainable

KEPT = 3
"""Healthy snapshots beside that of the start."""
RECORD = "interventions.jsonl"


def facts_of(config: RunConfig) -> Facts:
    """What the doctor may know of a run."""
    return Facts.of(filled(config, resolve(config)).model_dump(mode="json"))


def is_on(run: Run) -> bool:
    return run.config.diagnostics.on_alarm == "rollback"


def keep_if_healthy(run: Run, state: State, row: dict[str, Any], findings: Sequence[Finding]) -> None:
    """A snapshot when one is due and nothing that a rollback could cure is in sight."""
    folder = run.folder / "healthy"
    due = state.step % run.config.diagnostics.healthy_every_phases == 0
    if not is_on(run) or not due or not run.watch.is_calm(findings):
        return
    checkpoint.write(folder, state.step, lambda place: snapshot.fill(place, run_parts(run), state, row))
    for path in checkpoint.listed(folder)[1:-KEPT]:
        shutil.rmtree(path)


def forget(run: Run, beyond: int) -> None:
    """Remove the snapshots beyond a step: they are of a path not taken, or the run is over (-1)."""
    folder = run.folder / "healthy"
    checkpoint.clean(folder)
    for path in checkpoint.listed(folder):
        if (checkpoint.step_of(path) or 0) > beyond:
            shutil.rmtree(path)
    if beyond < 0:
        shutil.rmtree(folder, ignore_errors=True)


def roll_back(run: Run, state: State, alarms: Sequence[Finding], row: dict[str, Any]) -> tuple[Run, State] | None:
    """None when no intervention is left, or no state from before the alarm."""
    alarm = min(alarms, key=lambda f: (f.first, f.named))
    if len(state.interventions) >= run.config.diagnostics.max_interventions:
        return None
    source = _newest_before(run.folder, alarm.first)
    if source is None:
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
        first=alarm.first,
        back_to=restored.state.step,
        rung=rung,
        overrides=overrides,
        episodes_lost=state.episodes - restored.state.episodes,
    )
    back = replace(restored.state, interventions=(*state.interventions, intervention))
    of_source = with_overrides(run.base_config, all_overrides(restored.state.interventions))
    run = retuned(run, of_source, with_overrides(run.config, overrides), raised or rung == "kl")
    run.sampler.load_weights(iter(run.roles.actor.named_parameters()), back.step)
    run.log.rewind(restored.offsets, back.step)
    run.watch.remember(run.log.rows(), facts_of(run.config))
    checkpoints = run.folder / "checkpoints"
    checkpoint.set_aside(checkpoints, back.step)
    forget(run, back.step)
    checkpoint.write(checkpoints, back.step, lambda place: snapshot.fill(place, run_parts(run), back, row))
    write_record(run.folder, back)
    run.screen.warn(said(intervention))
    return run, back


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


def _newest_before(folder: Path, step: int) -> Path | None:
    """The newest whole state from before a step, of checkpoints and snapshots."""
    places = [*checkpoint.listed(folder / "healthy"), *checkpoint.listed(folder / "checkpoints")]
    before = [path for path in places if (checkpoint.step_of(path) or 0) < step]
    before.sort(key=lambda path: checkpoint.step_of(path) or 0, reverse=True)
    return next((path for path in before if checkpoint.damage(path) is None), None)


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
