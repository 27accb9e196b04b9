"""The batch arithmetic: how many episodes, phases, optimizer steps, checkpoints and evaluations a run has.

episode = one prompt with one response. A rollout phase has rollout_batch_size episodes. A train batch has
micro_batch_size x gradient_accumulation_steps x ranks episodes and makes one optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass

from klimb.config.posture import Posture
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Counts:
    episodes: int
    prompts_per_phase: int
    phases: int
    phase: int
    last_phase: int
    train_batch: int
    steps_per_phase: int
    optimizer_steps: int
    checkpoints: int
    evals: int
    ranks: int

    @property
    def batch_ratio(self) -> float:
        """Rollout batch : train batch; 4 to 8 is the usual range."""
        return self.phase / self.train_batch


def may_skip_old(config: RunConfig, posture: Posture) -> bool:
    """Whether a phase of one optimizer step can do without the old policy's forward.

    So when nothing before that step reads the old log-probs (no KL in the reward, no rollout correction), and the step
    trains on all that would have been scored (nothing left out or drawn).
    """
    a = config.algorithm
    corrects = a.rollout_correction.weights != "none" or a.rollout_correction.reject is not None
    trains_on_less = a.filter_groups or a.truncated == "exclude" or a.policy_filtration.strategy != "none"
    return posture.explicit and not (posture.kl_in_reward or corrects or trains_on_less)


def skips_old_pass(config: RunConfig, posture: Posture, counts: Counts) -> bool:
    """Whether a whole phase does without the old policy's forward."""
    return counts.steps_per_phase == 1 and may_skip_old(config, posture)


def due(before: int, after: int, every: int) -> bool:
    """Whether the episode count crossed a multiple of `every` between two phases' ends."""
    return after // every > before // every


def count(config: RunConfig, posture: Posture, num_prompts: int | None = None) -> Counts:
    """The counts of the whole run. num_prompts: rows of the training data, where total_epochs needs it."""
    r, t = config.actor_rollout_ref, config.training
    episodes = t.total_episodes
    if t.total_epochs is not None and num_prompts is not None:
        episodes = min(episodes, t.total_epochs * num_prompts * r.rollouts_per_prompt)
    if episodes % r.rollouts_per_prompt:
        raise ConfigError(
            f"training.total_episodes {episodes} is no multiple of actor_rollout_ref.rollouts_per_prompt "
            f"{r.rollouts_per_prompt}; the last prompt's group would be incomplete"
        )
    phase = min(r.rollout_batch_size, episodes)
    ends = [min(n, episodes) for n in range(phase, episodes + phase, phase)]
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    if config.needs_critic and config.critic.warmup_phases >= len(sizes):
        raise ConfigError(
            f"critic.warmup_phases is {config.critic.warmup_phases}, but the run has {len(sizes)} rollout phases, so "
            "the policy would never be trained; needed: fewer than the phases of the run"
        )
    train_batch = t.micro_batch_size * t.gradient_accumulation_steps * config.num_ranks
    steps = [config.algorithm.ppo_epochs * -(-size // train_batch) for size in sizes]
    crossings = list(zip([0, *ends], ends, strict=False))
    saves = {b for a, b in crossings if due(a, b, t.save_freq)} | {episodes}
    evals = {b for a, b in crossings if due(a, b, posture.eval_every)} | {episodes}
    has_eval = bool(config.data.eval_files)
    return Counts(
        episodes=episodes,
        prompts_per_phase=phase // r.rollouts_per_prompt,
        phases=len(sizes),
        phase=phase,
        last_phase=sizes[-1],
        train_batch=train_batch,
        steps_per_phase=steps[0],
        optimizer_steps=sum(steps),
        checkpoints=len(saves),
        evals=(len(evals) + config.eval.before_training) if has_eval else 0,
        ranks=config.num_ranks,
    )


def table(config: RunConfig, counts: Counts) -> list[tuple[str, str, str]]:
    """The arithmetic for people: what, how many, where it comes from."""
    r, t = config.actor_rollout_ref, config.training
    tail = "" if counts.last_phase == counts.phase else f", the last has {counts.last_phase:,}"
    return [
        (
            "episodes",
            f"{counts.episodes:,}",
            "training.total_episodes" + (" or total_epochs" if t.total_epochs else ""),
        ),
        (
            "rollout phase",
            f"{counts.phase:,} episodes",
            f"{counts.prompts_per_phase:,} prompts x {r.rollouts_per_prompt} responses"
            + (", and a greedy one each" if config.algorithm.estimator.needs_greedy else ""),
        ),
        ("rollout phases", f"{counts.phases:,}", f"{counts.episodes:,} / {counts.phase:,}{tail}"),
        (
            "train batch",
            f"{counts.train_batch:,} episodes",
            f"{t.micro_batch_size} micro x {t.gradient_accumulation_steps} accumulation x {counts.ranks} rank(s), "
            "one optimizer step",
        ),
        (
            "optimizer steps per phase",
            f"{counts.steps_per_phase:,}",
            f"{config.algorithm.ppo_epochs} epoch(s) x ceil({counts.phase:,} / {counts.train_batch:,})",
        ),
        ("optimizer steps", f"{counts.optimizer_steps:,}", f"the {t.lr_scheduler} schedule counts these"),
        ("rollout : train batch", f"{counts.batch_ratio:g}", _ratio_note(counts)),
        (
            "checkpoints",
            f"{counts.checkpoints:,}",
            f"every {t.save_freq:,} episodes, at the end, and one more at a new best",
        ),
        (
            "evaluations",
            f"{counts.evals:,}",
            "of the held-out prompts" if counts.evals else "none: data.eval_files is empty",
        ),
    ]


def _ratio_note(counts: Counts) -> str:
    if 4 <= counts.batch_ratio <= 8:
        return "within the usual 4 to 8"
    per_rank = counts.train_batch // counts.ranks
    for ratio in (4, 8):
        if counts.phase % (per_rank * ratio) == 0 and counts.phase // (per_rank * ratio) > counts.ranks:
            return f"outside the usual 4 to 8; it is {ratio} on {counts.phase // (per_rank * ratio)} ranks"
    return "outside the usual 4 to 8"
