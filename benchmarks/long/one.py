"""One phase of recorded rows, from the passes before the update to its last optimizer step, in a process of its own:
peak memory and seconds as a run's own clock reads them, as one JSON line.

python benchmarks/long/one.py FOLDER 8192 explicit|cached [--checkpointing] [--ppo] [--size 15m] [--threads 1]

FOLDER: what `cases.py FOLDER` wrote. Token ids are made up and the sampler's log-probs are the model's own, so nothing
is decoded; all else is what `klimb train` calls. Start the process with MALLOC_MMAP_THRESHOLD_=65536, as measure.py
does: each large tensor is then a mapping of its own, and a peak is what a phase holds, not where room was found.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cases import REWARDS, SIZES, Case, shapes, tree

from klimb.batch import Minibatch, Split, collate, forward_lengths, split_phase, trimmed
from klimb.clock import Clock, peak_bytes, reset_peak
from klimb.config.counts import count
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.derive import actor_steps, make_controller, make_recipe, make_schedule, make_split
from klimb.learn import Roles, estimate_advantages, is_on_policy, score_tokens
from klimb.models.attention import recompute_activations
from klimb.models.forward import token_logprobs
from klimb.models.load import body_of, critic_from, frozen_copy, load_causal_lm
from klimb.recipe import Recipe
from klimb.types import Batch, Prompt, Sample, Scored
from klimb.update import Trainable, make_trainable, update

CPU = torch.device("cpu")
PAD, FIRST_WORD = 0, 3
WARM_UP = 256
"""Tokens of the longest row of a phase that is not measured: after it AdamW's moments and all libraries are there."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a phase needs of a run."""

    roles: Roles
    recipe: Recipe
    split: Split
    coef: float
    actor: Trainable
    critic: Trainable | None


def build(case: Case, folder: Path) -> Parts:
    """As klimb.build makes them from the same config."""
    path = folder / f"{case.name}.yaml"
    path.write_text(json.dumps(tree(case, folder)))  # JSON is YAML
    config = RunConfig.load(path)
    posture = resolve(config)
    counts = count(config, posture)
    model = load_causal_lm(folder / case.size, False, CPU)
    roles = Roles(actor=model, reference=frozen_copy(model), critic=critic_from(model) if case.ppo else None)
    if case.checkpointing:
        recompute_activations(body_of(model))
        if roles.critic is not None:
            recompute_activations(roles.critic.body)
    decay = config.training.weight_decay
    critic_schedule = make_schedule(config, counts.optimizer_steps, config.critic.lr)
    return Parts(
        roles=roles,
        recipe=make_recipe(config, posture, torch.float32),
        split=make_split(config, counts),
        coef=make_controller(config, posture).coef,
        actor=make_trainable(model, make_schedule(config, actor_steps(config, counts), posture.lr), decay),
        critic=None if roles.critic is None else make_trainable(roles.critic, critic_schedule, decay),
    )


def recorded(parts: Parts, tokens: int) -> tuple[Batch, list[list[Minibatch]]]:
    """Rows as a rollout phase would have left them, and their cut."""
    generator = torch.Generator().manual_seed(tokens)
    vocab = int(parts.roles.actor.config.vocab_size)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(FIRST_WORD, vocab, (number,), generator=generator).tolist())

    prompts = {row: ids(number) for row, number, _ in shapes(tokens)}
    scored = [
        _scored(index, Prompt(row=row, text="", token_ids=prompts[row], answer=None, source="made up"), ids(number))
        for index, (row, _, number) in enumerate(shapes(tokens))
    ]
    batch = collate(scored, PAD)
    epochs = split_phase(forward_lengths(batch), batch.group, replace(parts.split, budget=tokens), seed=0)
    logprobs = torch.zeros_like(batch.sampler_logprobs)
    for rows in (rows for micros in epochs[0] for rows in micros):
        b = trimmed(batch, rows)
        of_rows = token_logprobs(parts.roles.actor, b.tokens, b.attention, b.mask, parts.recipe.temperature)
        logprobs[rows, : b.tokens.shape[1]] = of_rows
    return replace(batch, sampler_logprobs=logprobs), epochs


def _scored(index: int, prompt: Prompt, answer: tuple[int, ...]) -> Scored:
    before, after = len(prompt.token_ids), len(answer)
    sample = Sample(
        prompt=prompt,
        index=index,
        token_ids=prompt.token_ids + answer,
        mask=(False,) * before + (True,) * after,
        logprobs=(0.0,) * (before + after),
        policy_version=(-1,) * before + (0,) * after,
        finish_reason="length" if index == 0 else "stop",
        text="",
    )
    rewards = ((before + after - 1, REWARDS[index]),)
    return Scored(sample=sample, rewards=rewards, parts={}, correct=None, failure=None)


def play(parts: Parts, batch: Batch, epochs: list[list[Minibatch]], clock: Clock) -> dict[str, float]:
    """The second half of a turn, as klimb.loop makes it."""
    recipe = parts.recipe
    with clock("score"):
        ready, metrics = score_tokens(batch, epochs[0], parts.roles, recipe, is_on_policy(epochs, recipe))
        train, more = estimate_advantages(ready, recipe, parts.coef)
    with clock("update"):
        return {**metrics, **more, **update(parts.actor, parts.critic, train, epochs, recipe, parts.coef)}


def measure(case: Case, folder: Path) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parents[1] / "speed"))
    from machine import Mark

    parts = build(case, folder)
    play(parts, *recorded(parts, WARM_UP), Clock(CPU))
    batch, epochs = recorded(parts, case.tokens)
    reset_peak(CPU)
    before, clock, start = peak_bytes(CPU), Clock(CPU), Mark.now()
    metrics = play(parts, batch, epochs, clock)
    others = start.until(Mark.now()).others
    broken = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if broken or metrics["policy/skipped_steps"]:
        raise SystemExit(f"{case.name}: not finite: {', '.join(broken) or 'a step that was skipped'}")
    return {
        "tokens": [int(n) for n in forward_lengths(batch)],
        "before_bytes": before,
        "peak_bytes": clock.peaks,
        "seconds": {part: round(value, 3) for part, value in clock.seconds.items()},
        "forwards": sum(len(micros) for micros in epochs[0]),
        "old_forwards": int(metrics["policy/old_forwards"]),
        "first_ratio_dev_max": metrics["policy/first_ratio_dev_max"],
        "grad_norm": metrics["policy/grad_norm"],
        "others_cores": round(others, 3),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokens", type=int)
    parser.add_argument("posture", choices=("explicit", "cached"))
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--ppo", action="store_true")
    parser.add_argument("--size", choices=SIZES, default=SIZES[0])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case = Case(
        tokens=args.tokens,
        explicit=args.posture == "explicit",
        checkpointing=args.checkpointing,
        ppo=args.ppo,
        size=args.size,
    )
    print(json.dumps(measure(case, args.folder)), flush=True)


if __name__ == "__main__":
    main()
