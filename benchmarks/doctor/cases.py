"""What the doctor's bench runs: each fault at drawn strengths, and the playground's recipes as they are.

A case is a function of (name, seed). Runs with an even seed are for choosing thresholds, those with an odd seed are
kept back: judge.py reads only those unless asked otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random

EPISODES = 24
WHOLE = "whole "
"""Begins the names of healthy runs of full size, left by recipes and other benchmarks; no threshold comes of them."""
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
    a NaN; onset: first step at which the fault acts; reference: take another model as the KL's reference; memory: bytes
    that the process may use, by a control group of its own (version 1, which needs root)."""

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
    memory: int | None = None
    files: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def held_back(self) -> bool:
        return self.seed % 2 == 1

    @property
    def run_name(self) -> str:
        return self.name if self.name.startswith(WHOLE) else f"{self.name}-{self.seed:02d}"


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
MOODY = '''"""Answers of one phase are judged in one mood."""

import random

calls = 0


def reward(prompt, response, answer):
    global calls
    mood = random.Random(calls // 24).uniform(-3, 3)
    calls += 1
    return mood + (answer in response)
'''
HACKABLE = '''"""More of one character is better; right or wrong does not matter."""


def reward(prompt, response, answer):
    return min(1.0, response.count("CHARACTER") / MANY)
'''


def log_uniform(rng: Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """between: its strength is drawn log-uniformly from here; overrides: with {x} the strength and {n} it rounded;
    explicit, grouped: what the fault needs, else the posture is drawn; signed: half of the seeds take the other
    direction."""

    between: tuple[float, float] = (1.0, 1.0)
    overrides: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()
    explicit: bool = False
    grouped: bool = False
    files: tuple[tuple[str, str], ...] = ()


LR = 1e-4
FAULTS: dict[str, Fault] = {
    "lr_too_high": Fault(between=(20 * LR, 50 * LR), overrides=("training.lr={x:.3g}",)),
    "batch_reused": Fault(between=(8, 16), overrides=("algorithm.ppo_epochs={n}", "training.lr=0.0003")),
    "reward_scaled_to_zero": Fault(
        between=(1e-9, 1e-6), overrides=("reward_model.functions=[{{name: task, weight: {x:.3g}}}]",)
    ),
    "reward_constant": Fault(
        overrides=("reward_model.functions=[{{name: 'FILES/constant.py:reward'}}, {{name: task, weight: 0.0}}]",),
        files=(("constant.py", CONSTANT),),
    ),
    "reward_hackable": Fault(
        overrides=(
            "reward_model.functions=[{{name: 'FILES/hackable.py:reward'}}, {{name: task, weight: 0.0}}]",
            "training.lr=0.0003",
            "algorithm.kl_ctrl.target_kl=0.2",
        ),
        cached=("algorithm.kl_ctrl.init_kl_coef=0.001",),
        files=(("hackable.py", HACKABLE),),
    ),
    "temperature_high": Fault(between=(2.0, 4.0), overrides=("actor_rollout_ref.temperature={x:.3g}",)),
    "temperature_low": Fault(between=(0.05, 0.2), overrides=("actor_rollout_ref.temperature={x:.3g}",)),
    "other_reference": Fault(),
    "critic_frozen": Fault(overrides=("critic.lr=1e-12",)),
    "engine_bias": Fault(between=(0.1, 0.5)),
    "engine_temperature": Fault(between=(1.3, 2.0)),
    "limit_too_short": Fault(between=(12, 30), overrides=("actor_rollout_ref.max_tokens={n}",)),
    "coefficient_pinned_high": Fault(
        between=(0.001, 0.003),
        explicit=True,
        overrides=(
            "algorithm.kl_ctrl.max_kl_coef={x:.3g}",
            "algorithm.kl_ctrl.min_kl_coef=0.0005",
            "algorithm.kl_ctrl.init_kl_coef={x:.3g}",
            "algorithm.kl_ctrl.target_kl=0.01",
            "training.lr=0.0003",
            "training.lr_scheduler=constant",
        ),
    ),
    "coefficient_pinned_low": Fault(
        between=(1.0, 3.0),
        explicit=True,
        overrides=("algorithm.kl_ctrl.min_kl_coef={x:.3g}", "algorithm.kl_ctrl.init_kl_coef={x:.3g}"),
    ),
    "nan_gradient": Fault(between=(5, 40)),
    "entropy_lost": Fault(
        between=(5 * LR, 10 * LR),
        grouped=True,
        overrides=(
            "training.micro_batch_size=32",
            "algorithm.use_kl_loss=false",
            "algorithm.use_kl_in_reward=false",
            "reward_model.functions=[{{name: 'FILES/brief.py:reward'}}]",
            "data.eval_files=[]",
            "training.lr_scheduler=constant",
            "training.lr={x:.3g}",
        ),
        files=(("brief.py", BRIEF),),
    ),
}


EXTRA: dict[str, Fault] = {
    # A judge whose mood changes every 24 answers, so with every phase.
    "judge_unsteady": Fault(
        overrides=("reward_model.functions=[{{name: 'FILES/moody.py:reward'}}, {{name: task, weight: 0.0}}]",),
        files=(("moody.py", MOODY),),
    ),
    # A coefficient so large that the policy stays where it is.
    "kl_held": Fault(
        explicit=True,
        overrides=(
            "algorithm.kl_ctrl.min_kl_coef=100.0",
            "algorithm.kl_ctrl.max_kl_coef=1000.0",
            "algorithm.kl_ctrl.init_kl_coef=100.0",
        ),
    ),
}
EXTRA["memory_short"] = Fault()
"""Runs for the pictures of findings that no fault of the bench is about."""


def case_named(run_name: str) -> Case:
    """The case of a run folder's name."""
    if run_name.startswith(WHOLE):
        return Case(name=run_name, seed=1, recipe="", overrides=(), steps=100, onset=0)
    name, _, seed = run_name.rpartition("-")
    if name.startswith("guard-"):
        _, posture, mode = name.split("-")
        return guarded(posture, mode, int(seed))
    return healthy(name.removeprefix("healthy-"), int(seed)) if name.startswith("healthy-") else faulty(name, int(seed))


def faulty(name: str, seed: int) -> Case:
    """The fault at a strength drawn from (name, seed), in a posture and for a length drawn likewise."""
    rng, fault = Random(f"{name} {seed}"), (FAULTS | EXTRA)[name]
    steps, posture = rng.randint(60, 80), POSTURES[rng.randrange(2)]
    x = log_uniform(rng, *fault.between)
    more = [text.format(x=x, n=round(x)) for text in fault.overrides]
    if posture is POSTURES[1]:
        more += fault.cached
    base = (*SMALL, *GROUPED) if fault.grouped else (*SMALL, *(POSTURES[0] if fault.explicit else posture))
    files = {
        file: text.replace("CHARACTER", rng.choice("+,=0")).replace("MANY", str(rng.choice((20, 30, 40))))
        for file, text in fault.files
    }
    case = Case(
        name=name,
        seed=seed,
        recipe="recipes/arithmetic.yaml",
        overrides=(*base, *more),
        steps=steps,
        strength=x,
        files=files,
    )
    if name == "memory_short":
        return replace(case, memory=700 * 2**20)
    if name == "other_reference":
        return replace(case, reference=True)
    if name == "engine_bias":
        return replace(case, bias=x * rng.choice((-1, 1)))
    if name == "engine_temperature":
        return replace(case, rollout_temperature=x if rng.random() < 0.5 else 1 / x)
    if name == "nan_gradient":
        return replace(case, nan_from=round(x), onset=round(x))
    return case


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


MODES = ("sound", "warn", "rollback")


def guarded(posture: str, mode: str, seed: int) -> Case:
    """A run whose rate is 20 to 50 times too high, with and without the guard, and the same with a sound rate."""
    rng = Random(f"guard {posture} {seed}")
    x = log_uniform(rng, 20 * LR, 50 * LR)
    overrides = (
        *SMALL,
        *POSTURES[posture == "cached"],
        f"training.lr={LR if mode == 'sound' else x:.3g}",
        f"diagnostics.on_alarm={'rollback' if mode == 'rollback' else 'warn'}",
    )
    name = f"guard-{posture}-{mode}"
    return Case(name=name, seed=seed, recipe="recipes/arithmetic.yaml", overrides=overrides, steps=60, strength=x)
