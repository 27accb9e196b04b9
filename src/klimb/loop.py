"""The loop, on one page: rollout, reward, passes, advantages, update, controller, log, save.

One turn is one on-policy phase; `step` counts finished turns. Everything random is a function of (seed, step),
so a run killed anywhere and resumed walks the same path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from klimb import checkpoint, guard, snapshot
from klimb.batch import Minibatch, forward_lengths, least_read, micro_batches, split_phase
from klimb.clock import Clock, measures_peaks
from klimb.config.counts import due
from klimb.describe import describe, rollout_metrics
from klimb.doctor.finding import Finding
from klimb.evaluation import run_eval
from klimb.floor import Work
from klimb.interrupt import Interrupt
from klimb.ladder import is_curable
from klimb.learn import estimate_advantages, is_on_policy, score_tokens
from klimb.phase import Phase, play
from klimb.run import Run, renew_engine, run_parts
from klimb.seeds import derive_seed
from klimb.snapshot import State
from klimb.types import TrainBatch
from klimb.update import update
from klimb.watch import sentence


def train(run: Run, state: State) -> State:
    """Turn until the episodes are used up, somebody asks to stop, or an alarm does. The last state is saved, unless the
    guard had nothing left to try: then the newest checkpoint is from before the alarm."""
    interrupt = Interrupt(run.ranks.stop)
    start = state.step
    renew_engine(run, start, _clock(run, start, start))
    with interrupt.listening():
        if state == State():
            row = _before_training(run)
            guard.keep_if_healthy(run, state, row, ())
        stopping = run.ranks.any(interrupt.asked)
        while state.episodes < run.counts.episodes and not stopping:
            before = state
            state, row = _turn(run, state, start)
            # Read once: a signal after this line is seen after the next turn, and saved.
            stopping = run.ranks.any(interrupt.asked)
            alarms = _examine(run, state, row)
            if alarms and run.config.diagnostics.on_alarm == "rollback":
                rolled = guard.roll_back(run, state, alarms)
                if rolled is None:
                    run.watch.stopped = alarms
                    break
                run, state = rolled
                continue
            if alarms:
                run.watch.stopped, stopping = alarms, True
            is_best = state.best_step == state.step
            if is_best or stopping or _due(run, before, state, run.config.training.save_freq):
                with run.screen.busy("saving"):
                    _save(run, state, row)
    return state


def _clock(run: Run, step: int, start: int) -> Clock:
    device = run.roles.actor.device
    return Clock(device, partial(run.last_words.say, step), measures_peaks(device, step, start))


def _before_training(run: Run) -> dict[str, Any]:
    """Where the run starts from, on held-out prompts."""
    row: dict[str, Any] = {"step": 0, "episodes": 0}
    if run.config.eval.before_training and run.eval_prompts:
        clock = _clock(run, 0, 0)
        row |= _evaluate(run, 0, clock)
        run.log.metrics({**row, **clock.metrics()})
        run.screen.row(row)
        run.watch.see(row)
    return row


def _examine(run: Run, state: State, row: dict[str, Any]) -> tuple[Finding, ...]:
    """The doctor's look at the step. The alarms that the run is to act on: none when it only warns."""
    findings = run.watch.see(row)
    for finding in run.watch.news(findings):
        run.screen.warn(sentence(finding))
    guard.keep_if_healthy(run, state, row, findings)
    alarms, action = run.watch.current_alarms(findings), run.config.diagnostics.on_alarm
    if action == "warn":
        return ()
    return tuple(f for f in alarms if action == "stop" or is_curable(f))


def _turn(run: Run, state: State, start: int) -> tuple[State, dict[str, Any]]:
    """One on-policy phase, from prompts to a logged row. start: steps that were done before this process."""
    step, seed = state.step + 1, derive_seed(run.config.training.seed, state.step)
    clock = _clock(run, step, start)
    episodes = min(run.counts.phase, run.counts.episodes - state.episodes)
    phase = play(run, episodes, step, seed, clock)
    warming_up = step <= run.config.critic.warmup_phases and run.critic is not None
    with clock("score"):
        epochs = split_phase(forward_lengths(phase.batch), phase.batch.group, run.split, seed)
        parts = [run.fallback.cut(micros) for micros in epochs[0]]  # as the update cuts them, or the ratio is not 1
        skip_old = not warming_up and is_on_policy(epochs, run.recipe)
        scored_batch, score_metrics = score_tokens(
            phase.batch, parts, run.roles, run.recipe, skip_old, _value_parts(run, phase), run.ranks
        )
        generator = torch.Generator().manual_seed(derive_seed(seed, "filtration"))
        train_batch, advantage_metrics = estimate_advantages(scored_batch, run.recipe, run.controller.coef, generator)
    with clock("update"):
        lr, kl_coef = run.actor.lr, run.controller.coef
        if not torch.equal(forward_lengths(train_batch), forward_lengths(phase.batch)):
            epochs = split_phase(forward_lengths(train_batch), train_batch.group, run.split, seed)  # rows were left out
        actor = None if warming_up else run.actor
        update_metrics = update(actor, run.critic, train_batch, epochs, run.recipe, kl_coef, run.ranks, run.fallback)
    renew_engine(run, step, clock)
    measured = {**score_metrics, **update_metrics}
    # While the critic warms up the policy stays where it is: there is nothing to steer.
    follow_metrics = {} if warming_up else _steer(run, measured, phase.with_token)
    before, state = state, replace(state, step=step, episodes=state.episodes + episodes)
    row: dict[str, Any] = {
        "step": step,
        "episodes": state.episodes,
        "epoch": run.prompts.epoch,
        "lr": lr,
        **phase.metrics,
        **rollout_metrics(phase.samples),
        **measured,
        **describe(run.posture, run.config.algorithm.kl_ctrl, measured, kl_coef),
        **follow_metrics,
        **advantage_metrics,
    }
    if run.eval_prompts and _due(run, before, state, run.posture.eval_every):
        row |= _evaluate(run, step, clock)
        state = _note_best(run, state, row)
    work = _work(run, phase, train_batch, old=score_metrics["policy/old_forwards"] > 0, warming_up=warming_up)
    tokens = {"rollout": work.rollout_scored, "update": work.update_read}
    times = clock.metrics(tokens, episodes) | run.floor.shares(work.operations(run.floor), clock.seconds)
    row, times = run.ranks.first(lambda: (row, times))  # what the doctor decides by is the same everywhere
    run.log.samples(step, phase.scored[: run.config.logging.samples_per_phase])
    run.log.metrics({**row, **times})
    run.screen.row({**row, **times})
    return state, row


def _value_parts(run: Run, phase: Phase) -> Minibatch:
    """The critic's pass before the update, in its own larger batches: nothing is kept for a backward."""
    return micro_batches(torch.arange(phase.batch.num_rows), forward_lengths(phase.batch), run.value_split)


def _work(run: Run, phase: Phase, train_batch: TrainBatch, old: bool, warming_up: bool) -> Work:
    """What the turn computed; a prompt asked for several times is read once."""
    prompts = {s.prompt.row: len(s.prompt.token_ids) for s in phase.samples}
    sampled, epochs = sum(s.num_response_tokens for s in phase.samples), run.config.algorithm.ppo_epochs
    return Work(
        rollout_read=sum(prompts.values()) + sampled,
        rollout_scored=sampled,
        score_read=least_read(phase.batch),
        score_scored=int(phase.batch.mask.sum()),
        update_read=least_read(train_batch),
        update_scored=int(train_batch.mask.sum()),
        old=old,
        reference=run.roles.reference is not None,
        actor_epochs=0 if warming_up else epochs,
        critic_epochs=0 if run.critic is None else epochs,
    )


def _steer(run: Run, measured: Mapping[str, float], with_token: int) -> dict[str, float]:
    """The controller's update, from the divergence to the reference; says so when the KL does not follow."""
    if not run.posture.needs_reference or "kl/k3" not in measured:
        return {}
    metrics, message = run.follow.update(measured["kl/k3"], run.controller.coef)
    if message is not None:
        run.screen.warn(message)
    run.controller.update(measured["kl/k3"], with_token)
    return metrics


def _evaluate(run: Run, step: int, clock: Clock) -> dict[str, float]:
    with clock("eval"):
        result = run_eval(
            run.sampler,
            run.eval_prompts,
            run.config.eval.samples_per_prompt,
            run.eval_sampling,
            run.components,
            run.reward_settings,
            run.config.training.seed,
            run.screen.progress(f"step {step}: eval"),
        )
    run.screen.failures(result.messages)
    run.log.samples(step, result.scored[: run.config.logging.samples_per_phase], "eval")
    return result.metrics


def _due(run: Run, before: State, after: State, every: int) -> bool:
    """When the count crosses a multiple of `every`, and at the end of the run."""
    return due(before.episodes, after.episodes, every) or after.episodes >= run.counts.episodes


def _note_best(run: Run, state: State, row: dict[str, Any]) -> State:
    value = row.get(f"eval/{run.config.eval.metric}")
    if value is None or (state.best_value is not None and value <= state.best_value):
        return state
    return replace(state, best_step=state.step, best_value=float(value))


def _save(run: Run, state: State, row: dict[str, Any]) -> None:
    folder = run.folder / "checkpoints"
    checkpoint.write(folder, state.step, lambda place: snapshot.fill(place, run_parts(run), state, row), run.ranks)
    run.ranks.first(lambda: checkpoint.prune(folder, run.config.training.keep_checkpoints, state.best_step))
