"""The loop, on one page: rollout, reward, passes, advantages, update, controller, log, save.

One turn is one on-policy phase; `step` counts finished turns. Everything random is a function of (seed, step),
so a run killed anywhere and resumed walks the same path.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from klimb import checkpoint, snapshot
from klimb.algos.kl import KLController
from klimb.batch import Split, collate, split_phase
from klimb.config.counts import Counts, due
from klimb.config.posture import Posture
from klimb.config.schema import RunConfig
from klimb.console import Screen
from klimb.data.prompts import PromptStream
from klimb.describe import describe, rollout_metrics
from klimb.evaluation import run_eval
from klimb.follow import Follow
from klimb.learn import Roles, estimate_advantages, group_metrics, is_on_policy, score_tokens
from klimb.recipe import Recipe
from klimb.reward.base import RewardComponent, RewardSettings
from klimb.reward.combine import Moments, score_samples
from klimb.rollout.base import Request, Sampler, Sampling
from klimb.runlog import RunLog
from klimb.seeds import derive_seed
from klimb.selection import drop_alike_groups, shape_rewards, with_greedy
from klimb.snapshot import State
from klimb.types import Batch, Prompt, Sample
from klimb.update import Trainable, update


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a turn needs, built once by build.py."""

    config: RunConfig
    posture: Posture
    counts: Counts
    recipe: Recipe
    split: Split
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    roles: Roles
    actor: Trainable
    critic: Trainable | None
    controller: KLController
    follow: Follow
    sampler: Sampler
    sampling: Sampling
    greedy_sampling: Sampling | None
    eval_sampling: Sampling
    prompts: PromptStream
    eval_prompts: tuple[Prompt, ...]
    components: tuple[RewardComponent, ...]
    reward_settings: RewardSettings
    moments: Moments
    log: RunLog
    screen: Screen


@dataclass
class Clock:
    """Seconds by part of a turn."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, part: str) -> Generator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


@dataclass
class Interrupt:
    """Ctrl-C or SIGTERM: the first lets the turn end and saves, the second stops at once."""

    asked: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # Plain write: a signal may fall into the middle of somebody else's print.
        os.write(2, b"\nstopping after this step; once more to stop at once\n")

    @contextmanager
    def listening(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python hands signals to the main thread alone; whoever owns that one decides there
            return
        before = {s: signal.signal(s, self) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(run: Run, state: State) -> State:
    """Turn until the episodes are used up or somebody asks to stop; the last state is always saved."""
    interrupt = Interrupt()
    run.sampler.load_weights(iter(run.roles.actor.named_parameters()), state.step)
    with interrupt.listening():
        if state.step == 0 and run.config.eval.before_training and run.eval_prompts:
            clock = Clock()
            row = {"step": 0, "episodes": 0, **_evaluate(run, 0, clock)}
            run.log.metrics({**row, **_times(clock)})
            run.screen.row(row)
        stopping = interrupt.asked
        while state.episodes < run.counts.episodes and not stopping:
            before = state
            state, row = _turn(run, state)
            stopping = interrupt.asked  # read once: a signal after this line is seen after the next turn, and saved
            is_best = state.best_step == state.step
            if is_best or stopping or _due(run, before, state, run.config.training.save_freq):
                with run.screen.busy("saving"):
                    _save(run, state, row)
    return state


def _turn(run: Run, state: State) -> tuple[State, dict[str, Any]]:
    """One on-policy phase, from prompts to a logged row."""
    clock, step, seed = Clock(), state.step + 1, derive_seed(run.config.training.seed, state.step)
    episodes = min(run.counts.phase, run.counts.episodes - state.episodes)
    with clock("rollout"):
        samples = _rollout(run, episodes, step, seed)
    greedy = _greedy_rollout(run, samples, step, clock)
    with clock("reward"):
        scored, report = score_samples(samples, run.components, run.reward_settings, run.moments)
        run.screen.failures(report.messages)
        batch, reward_metrics = _phase_batch(run, collate(scored, run.pad_id), greedy)
        kept, filter_metrics = drop_alike_groups(batch, run.recipe)
    warming_up = step <= run.config.critic.warmup_phases and run.critic is not None
    with clock("score"):
        epochs = split_phase(kept.attention.sum(dim=1) * kept.mask.any(dim=1), run.split, seed)
        skip_old = not warming_up and is_on_policy(epochs, run.recipe)
        scored_batch, score_metrics = score_tokens(kept, epochs[0], run.roles, run.recipe, skip_old)
        generator = torch.Generator().manual_seed(derive_seed(seed, "filtration"))
        train_batch, advantage_metrics = estimate_advantages(scored_batch, run.recipe, run.controller.coef, generator)
    with clock("update"):
        lr, kl_coef = run.actor.lr, run.controller.coef
        if run.recipe.filtration != "none":
            epochs = split_phase(train_batch.attention.sum(dim=1) * train_batch.mask.any(dim=1), run.split, seed)
        update_metrics = update(None if warming_up else run.actor, run.critic, train_batch, epochs, run.recipe, kl_coef)
    run.sampler.load_weights(iter(run.roles.actor.named_parameters()), step)
    measured = {**score_metrics, **update_metrics}
    follow_metrics = _steer(run, measured, int(batch.mask.any(dim=1).sum()))
    before, state = state, replace(state, step=step, episodes=state.episodes + episodes)
    row: dict[str, Any] = {
        "step": step,
        "episodes": state.episodes,
        "epoch": run.prompts.epoch,
        "lr": lr,
        **report.metrics,
        **reward_metrics,
        **group_metrics(batch),
        **filter_metrics,
        **rollout_metrics(samples),
        **measured,
        **describe(run.posture, run.config.algorithm.kl_ctrl, measured, kl_coef),
        **follow_metrics,
        **advantage_metrics,
    }
    if run.eval_prompts and _due(run, before, state, run.posture.eval_every):
        row |= _evaluate(run, step, clock)
        state = _note_best(run, state, row)
    tokens = {"rollout": sum(s.num_response_tokens for s in samples), "update": int(batch.attention.sum())}
    run.log.samples(step, scored[: run.config.logging.samples_per_phase])
    run.log.metrics({**row, **_times(clock, tokens, episodes)})
    run.screen.row({**row, **_times(clock, tokens, episodes)})
    return state, row


def _rollout(run: Run, episodes: int, step: int, seed: int) -> list[Sample]:
    """Prompts from the stream, each asked for rollouts_per_prompt times; a request's seed is f(seed, step, row)."""
    group = run.config.actor_rollout_ref.rollouts_per_prompt
    prompts = run.prompts.take(episodes // group)
    requests = [
        Request(prompt=prompt, index=i * group + g, seed=derive_seed(seed, "rollout", i * group + g))
        for i, prompt in enumerate(prompts)
        for g in range(group)
    ]
    return run.sampler.generate(requests, run.sampling, run.screen.progress(f"step {step}: rollout"))


def _greedy_rollout(run: Run, samples: Sequence[Sample], step: int, clock: Clock) -> Batch | None:
    """One greedy answer per prompt of the phase, scored as the samples are; None unless the estimator asks for them."""
    if run.greedy_sampling is None:
        return None
    prompts = {s.prompt.row: s.prompt for s in samples}
    requests = [Request(prompt=prompt, index=i, seed=0) for i, prompt in enumerate(prompts.values())]
    with clock("rollout"):
        answers = run.sampler.generate(requests, run.greedy_sampling, run.screen.progress(f"step {step}: greedy"))
    with clock("reward"):
        scored, report = score_samples(answers, run.components, run.reward_settings, run.moments, learn_moments=False)
    run.screen.failures(report.messages)
    return collate(scored, run.pad_id)


def _phase_batch(run: Run, batch: Batch, greedy: Batch | None) -> tuple[Batch, dict[str, float]]:
    """Rewards as the estimator sees them: with the price of length, and the greedy answer's where it wants one."""
    batch, metrics = shape_rewards(batch, run.recipe)
    if greedy is None:
        return batch, metrics
    batch, greedy_metrics = with_greedy(batch, shape_rewards(greedy, run.recipe)[0])
    return batch, metrics | greedy_metrics


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
    checkpoint.write(folder, state.step, lambda place: snapshot.fill(place, run_parts(run), state, row))
    checkpoint.prune(folder, run.config.training.keep_checkpoints, state.best_step)


def run_parts(run: Run) -> snapshot.Parts:
    """What a checkpoint is made of."""
    return snapshot.Parts(
        config=run.config,
        tokenizer=run.tokenizer,
        actor=run.actor,
        critic=run.critic,
        stateful={"controller": run.controller, "follow": run.follow, "prompts": run.prompts, "moments": run.moments},
        offsets=run.log.offsets(),
    )


def _times(clock: Clock, tokens: dict[str, int] | None = None, episodes: int = 0) -> dict[str, float]:
    """time/* in seconds; perf/* per second."""
    total = sum(clock.seconds.values())
    out = {f"time/{part}": seconds for part, seconds in clock.seconds.items()} | {"time/step": total}
    for part, count in (tokens or {}).items():
        out[f"perf/{part}_tokens_per_s"] = count / max(clock.seconds[part], 1e-9)
    work = total - clock.seconds.get("eval", 0.0)
    return out | ({"perf/episodes_per_s": episodes / max(work, 1e-9)} if episodes else {})
