"""What the doctor's bench runs: each fault at drawn strengths, and the playground's recipes as they are.

A case is a function of (name, seed). Runs with an even seed are for choosing thresholds, those with an odd seed are
kept back: judge.py reads only those unless asked otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

EPISODES = 24
SMALL = (
    f"actor_rollout_ref.rollout_batch_size={EPISODES}",
    f"training.micro_batch_size={EPISODES // 2}",
    "training.save_freq=1000000000",
    "training.resume=never",
    "eval.every_episodes=240",
    "eval.max_prompts=48",
    "algorithm.kl_ctrl.horizon=240",
    "logging.tensorboard=false",
    "logging.samples_per_phase=2",
    "reward_model.workers=1",
)
"""Every run is this much smaller than its recipe: 24 episodes a phase in two optimizer steps."""
GROUPED = (
    "actor_rollout_ref.rollout_batch_size=32",
    "actor_rollout_ref.rollouts_per_prompt=8",
    "training.micro_batch_size=16",
    "algorithm.adv_estimator=grpo",
    "eval.every_episodes=320",
)
POSTURES = (("algorithm.use_pf_ppo=true", "algorithm.kl_ctrl.init_kl_coef=0.15"), ("algorithm.use_pf_ppo=false",))


@dataclass(frozen=True, kw_only=True)
class Case:
    """recipe with overrides; engine: what the sampler's log-probs are off by; nan_from: step from which gradients hold
    a NaN; onset: first step at which the fault acts; reference: take another model as the KL's reference."""

    name: str
    seed: int
    recipe: str
    overrides: tuple[str, ...]
    steps: int
    strength: float = 0.0
    onset: int = 1
    bias: float = 0.0
    rollout_temperature: float | None = None
    nan_from: int | None = None
    reference: bool = False
    files: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def held_back(self) -> bool:
        return self.seed % 2 == 1

    @property
    def run_name(self) -> str:
        return f"{self.name}-{self.seed:02d}"


EXPECTED: dict[str, tuple[str, ...]] = {
    "lr_too_high": ("kl_explosion",),
    "batch_reused": ("ratio_spikes", "kl_explosion"),
    "reward_scaled_to_zero": ("reward_degenerate",),
    "reward_constant": ("reward_degenerate",),
    "reward_hackable": ("reward_hacking",),
    "temperature_high": ("entropy_explosion",),
    "temperature_low": ("entropy_collapse",),
    "other_reference": ("kl_explosion",),
    "critic_frozen": ("critic_failing",),
    "engine_bias": ("engine_mismatch",),
    "engine_temperature": ("engine_mismatch",),
    "limit_too_short": ("truncation",),
    "coefficient_pinned_high": ("coefficient_pinned",),
    "coefficient_pinned_low": ("coefficient_pinned", "kl_vanished"),
    "nan_gradient": ("nonfinite",),
    "entropy_lost": ("entropy_collapse",),
}
"""The findings that name each injected fault."""

CONSTANT = '''"""The same for everybody."""


def reward(prompt, response, answer):
    return 0.7
'''
BRIEF = '''"""One short answer is best, and it is always the same."""


def reward(prompt, response, answer):
    return 1.0 - min(1.0, abs(len(response) - 12) / 60) - 0.2 * len(set(response)) / 12
'''
HACKABLE = '''"""More of one character is better; right or wrong does not matter."""


def reward(prompt, response, answer):
    return min(1.0, response.count("{character}") / {many})
'''


def log_uniform(rng: Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def faulty(name: str, seed: int) -> Case:
    """The fault at a strength drawn from (name, seed), in a posture and for a length drawn likewise."""
    rng = Random(f"{name} {seed}")
    steps, posture, recipe = rng.randint(60, 80), POSTURES[rng.randrange(2)], "recipes/arithmetic.yaml"
    base = (*SMALL, *posture)
    drawn = {
        "lr_too_high": (20, 50),
        "batch_reused": (8, 16),
        "reward_scaled_to_zero": (1e-9, 1e-6),
        "temperature_high": (2.0, 4.0),
        "temperature_low": (0.05, 0.2),
        "engine_bias": (0.1, 0.5),
        "engine_temperature": (1.3, 2.0),
        "limit_too_short": (12, 30),
        "coefficient_pinned_high": (0.001, 0.003),
        "coefficient_pinned_low": (1.0, 3.0),
        "nan_gradient": (5, 40),
        "entropy_lost": (5, 10),
    }
    x = log_uniform(rng, *drawn.get(name, (1, 1)))
    common = {"name": name, "seed": seed, "recipe": recipe, "steps": steps, "strength": x}
    lr = 1e-4

    def case(*overrides: str, **more: object) -> Case:
        return Case(**(common | more), overrides=(*base, *overrides))  # type: ignore[arg-type]

    explicit = (*SMALL, *POSTURES[0])
    match name:
        case "lr_too_high":
            return case(f"training.lr={lr * x:.3g}")
        case "batch_reused":
            return case(f"algorithm.ppo_epochs={round(x)}", f"training.lr={3 * lr:.3g}")
        case "reward_scaled_to_zero":
            return case(f"reward_model.functions=[{{name: task, weight: {x:.3g}}}]")
        case "reward_constant":
            return case(
                "reward_model.functions=[{name: 'FILES/constant.py:reward'}, {name: task, weight: 0.0}]",
                files={"constant.py": CONSTANT},
            )
        case "reward_hackable":
            text = HACKABLE.format(character=rng.choice("+,=0"), many=rng.choice((20, 30, 40)))
            return case(
                "reward_model.functions=[{name: 'FILES/hackable.py:reward'}, {name: task, weight: 0.0}]",
                f"training.lr={3 * lr:.3g}",
                "algorithm.kl_ctrl.target_kl=0.2" if posture is POSTURES[0] else "algorithm.kl_ctrl.init_kl_coef=0.001",
                files={"hackable.py": text},
            )
        case "temperature_high" | "temperature_low":
            return case(f"actor_rollout_ref.temperature={x:.3g}")
        case "other_reference":
            return case(reference=True)
        case "critic_frozen":
            return case("critic.lr=1e-12")
        case "engine_bias":
            return case(bias=x * rng.choice((-1, 1)))
        case "engine_temperature":
            return case(rollout_temperature=x if rng.random() < 0.5 else 1 / x)
        case "limit_too_short":
            return case(f"actor_rollout_ref.max_tokens={round(x)}")
        case "coefficient_pinned_high":
            return Case(
                **common,
                overrides=(
                    *explicit,
                    f"algorithm.kl_ctrl.max_kl_coef={x:.3g}",
                    "algorithm.kl_ctrl.min_kl_coef=0.0005",
                    f"algorithm.kl_ctrl.init_kl_coef={x:.3g}",
                    "algorithm.kl_ctrl.target_kl=0.01",
                    f"training.lr={3 * lr:.3g}",
                    "training.lr_scheduler=constant",
                ),
            )
        case "coefficient_pinned_low":
            return Case(
                **common,
                overrides=(
                    *explicit,
                    f"algorithm.kl_ctrl.min_kl_coef={x:.3g}",
                    f"algorithm.kl_ctrl.init_kl_coef={x:.3g}",
                ),
            )
        case "nan_gradient":
            return case(nan_from=round(x), onset=round(x))
        case "entropy_lost":
            return Case(
                **common,
                overrides=(
                    *SMALL,
                    *GROUPED,
                    "training.micro_batch_size=32",
                    "algorithm.use_kl_loss=false",
                    "algorithm.use_kl_in_reward=false",
                    "reward_model.functions=[{name: 'FILES/brief.py:reward'}]",
                    "data.eval_files=[]",
                    "training.lr_scheduler=constant",
                    f"training.lr={lr * x:.3g}",
                ),
                files={"brief.py": BRIEF},
            )
        case _:
            raise KeyError(name)


HEALTHY: dict[str, tuple[str, tuple[str, ...]]] = {
    "arithmetic": ("recipes/arithmetic.yaml", POSTURES[0]),
    "arithmetic-cached": ("recipes/arithmetic.yaml", POSTURES[1]),
    "quickstart": ("recipes/quickstart.yaml", ()),
    "instructions": ("recipes/instructions.yaml", ()),
    "arithmetic-rm": ("recipes/arithmetic-rm.yaml", ()),
    "arithmetic-grpo": ("recipes/arithmetic-grpo.yaml", GROUPED),
}


def healthy(name: str, seed: int) -> Case:
    """A recipe with its rate up to 1.5 times higher or lower."""
    rng = Random(f"healthy {name} {seed}")
    recipe, more = HEALTHY[name]
    x, steps = log_uniform(rng, 1 / 1.5, 1.5), rng.randint(60, 80)
    overrides = (*SMALL, *more, f"training.lr={1e-4 * x:.3g}")
    return Case(name=f"healthy-{name}", seed=seed, recipe=recipe, overrides=overrides, steps=steps, strength=x, onset=0)


def all_cases(seeds: range, healthy_seeds: range) -> list[Case]:
    """Seed by seed, so that a part of the bench is a smaller bench."""
    out: list[Case] = []
    for seed in range(max(seeds.stop, healthy_seeds.stop)):
        if seed in seeds:
            out += [faulty(name, seed) for name in EXPECTED]
        if seed in healthy_seeds:
            out += [healthy(name, seed) for name in HEALTHY]
    return out
