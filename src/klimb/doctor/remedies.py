"""What each finding means and what to try, in the order in which to try it (design: severity of the change)."""

from __future__ import annotations

from collections.abc import Callable

from klimb.doctor.finding import Facts, Remedy, Seen

MECHANISM: dict[str, str] = {
    "kl_explosion": (
        "Updates move the policy away from its reference faster than the KL term pulls it back. Once it samples text "
        "the reference finds unlikely, rewards and old log-probs describe another model than the one that is trained."
    ),
    "kl_explosion.reference": (
        "A run starts at its reference, so a KL before the first update means that ref_model_path names other "
        "weights. The KL term then pulls the policy towards a model it never was, and no controller can reach its "
        "target."
    ),
    "kl_vanished": (
        "The policy stays where its reference is: the gradient is too small, or the KL term outweighs it. A KL of "
        "zero is no sign of stability but of a run that learns nothing."
    ),
    "reward_degenerate": (
        "Advantages are differences between rewards; where all are alike there is none, and what is left is rounding "
        "and the critic's noise. Whitening blows that noise up to full size, so the policy drifts without a "
        "direction."
    ),
    "reward_volatile": (
        "The mean reward moves by more than other prompts and answers explain, so the scale of the advantages "
        "changes from step to step. In the cached posture nothing recomputed dampens it: it is that posture's weak "
        "spot."
    ),
    "reward_hacking": (
        "The policy found what the reward counts and the task does not ask for. Training reward rises as long as it "
        "may move that way, while held-out quality falls."
    ),
    "ratio_spikes": (
        "Within one phase the policy moves so far that the probability ratio leaves the region in which the clipped "
        "loss bounds a step. Clipping stops the gradient of single tokens, not the movement that other tokens cause."
    ),
    "engine_mismatch": (
        "The engine that sampled and the trainer disagree about the probability of the very same tokens: another "
        "temperature, precision, weight version or template. Every ratio carries that error as if the policy had "
        "moved."
    ),
    "entropy_collapse": (
        "The policy puts all its probability on one continuation, so the answers to a prompt are the same and their "
        "rewards too. Nothing is explored any more, and a collapsed policy seldom comes back by itself."
    ),
    "entropy_collapse.start": (
        "Sampling was next to greedy from the first step on. The answers to a prompt are the same, their rewards "
        "too, and there is nothing to prefer."
    ),
    "entropy_explosion": (
        "Probability leaks to tokens that no reward spoke for: steps that are too large, or pushing down many "
        "answers without pushing one up. The text falls apart soon after."
    ),
    "entropy_explosion.start": (
        "The sampling temperature flattens the distribution so far that answers are mostly chance. The model is "
        "trained on text it would never write at the temperature it is used at."
    ),
    "length_drift": (
        "The reward, or the way token losses are averaged, favours longer or shorter answers whatever they say. "
        "Length is the easiest thing to learn, so it moves first."
    ),
    "truncation": (
        "Answers are cut off before they end, so what they were going to say is never scored. The reward then "
        "teaches to be short, or nothing."
    ),
    "repetition": (
        "Once a phrase repeats, the model finds it likelier each time, and a reward that does not punish it lets it "
        "grow. Loops fill the answer up to the limit."
    ),
    "critic_failing": (
        "Advantages are returns minus the critic's values; values that explain nothing leave the whole return in "
        "them. Every token of an answer is then praised or blamed alike, with the noise of the full reward."
    ),
    "coefficient_pinned": (
        "The controller wants to go further than its clamp allows, so nothing steers the KL any more. At the upper "
        "clamp the policy outruns the penalty; at the lower one the penalty holds it back for no reason."
    ),
    "nonfinite": (
        "A NaN or an infinity came out of a loss or a gradient; klimb skips such steps and its weights stay sound, "
        "which others may not. It comes from overflow in exp, a division by a spread of zero, or a broken input."
    ),
    "memory_pressure": (
        "One phase of a step needs nearly all the memory there is. The next longer answer, or fragmentation, ends "
        "the run."
    ),
}
"""Two sentences by code, or by code and variant."""


def mechanism(code: str, variant: str) -> str:
    return MECHANISM.get(f"{code}.{variant}") or MECHANISM[code]


def remedies(code: str, seen: Seen, facts: Facts) -> tuple[Remedy, ...]:
    return tuple(REMEDIES[code](seen, facts))


PENALTY = "'algorithm.truncated={penalty: 0.5}'"
STEPS = "training.gradient_accumulation_steps"
OFFLOAD = ("training.offload.params=true", "training.offload.optimizer=true")


def _number(value: float) -> str:
    return f"{value:.3g}"


def _lower_lr(facts: Facts, by: float, text: str = "Lower the learning rate") -> Remedy:
    if facts.lr is None:
        return Remedy(text=f"{text}: a {'half' if by == 2 else f'{by:g}th'} of it or less", key="training.lr")
    return Remedy(text=f"{text} from {facts.lr:g}", override=f"training.lr={_number(facts.lr / by)}")


def _stronger_kl(facts: Facts) -> Remedy:
    if facts.kl_in_loss is False and facts.kl_in_reward is False:
        return Remedy(text="Switch a KL term on", override="algorithm.use_kl_loss=true")
    if facts.kl_type == "fixed" and facts.explicit:
        return Remedy(text="Let a controller steer the KL coefficient", override="algorithm.kl_ctrl.type=adaptive")
    now = facts.init_kl_coef
    override = None if now is None else f"algorithm.kl_ctrl.init_kl_coef={_number(max(2 * now, 0.01))}"
    return Remedy(
        text="Raise the KL coefficient, to twice as much for a start",
        override=override,
        key="algorithm.kl_ctrl.init_kl_coef",
    )


def _cooler(facts: Facts) -> Remedy:
    now = facts.temperature
    override = None if now is None or now <= 0.3 else f"actor_rollout_ref.temperature={_number(max(0.3, now - 0.2))}"
    return Remedy(text="Sample at a lower temperature", override=override, key="actor_rollout_ref.temperature")


def _reuse_less(facts: Facts) -> list[Remedy]:
    out: list[Remedy] = []
    if facts.ppo_epochs is None or facts.ppo_epochs > 1:
        out.append(Remedy(text="Pass over each rollout phase once", override="algorithm.ppo_epochs=1"))
    phase, train, micro = facts.rollout_batch, facts.train_batch, facts.micro_batch
    if phase is None or train is None or micro is None or train < phase:
        times = None if phase is None or micro is None or phase % micro else phase // micro
        override = None if times is None else f"training.gradient_accumulation_steps={times}"
        text, key = "Make one optimizer step per rollout phase (train batch = phase)", STEPS
        out.append(Remedy(text=text, override=override, key=key))
    return out


def _kl_explosion(seen: Seen, facts: Facts) -> list[Remedy]:
    if seen.variant == "reference":
        return [
            Remedy(text="Take the start as the reference", override="actor_rollout_ref.ref_model_path=null"),
            Remedy(text="Or start from the model the reference is, or the other way round", override=None),
        ]
    return [_lower_lr(facts, 2), _stronger_kl(facts), _cooler(facts), *_reuse_less(facts)]


def _kl_vanished(seen: Seen, facts: Facts) -> list[Remedy]:
    out = [
        Remedy(text="Look at the spread of the rewards first: reward/std, reward/frac_zero_std"),
        Remedy(text="Then at the spread of the advantages: advantage/std"),
        Remedy(text="Then at the gradient: policy/grad_norm, policy/skipped_steps"),
        Remedy(text="Then at the reward's scale", override="reward_model.normalize=running"),
    ]
    if facts.lr is not None:
        out.append(
            Remedy(text=f"Raise the learning rate from {facts.lr:g}", override=f"training.lr={_number(facts.lr * 3)}")
        )
    return out


def _reward_degenerate(seen: Seen, facts: Facts) -> list[Remedy]:
    grouped = facts.rollouts_per_prompt is not None and facts.rollouts_per_prompt > 1
    out = [
        Remedy(text="Read ten samples with their rewards: does the reward tell a good answer from a bad one?"),
        Remedy(text="Check the weights of the reward functions, and bring the score to a scale around 1"),
        Remedy(text="Or let klimb scale it", override="reward_model.normalize=running"),
    ]
    if grouped or seen.series == "reward/frac_zero_std":
        out.append(
            Remedy(text="Leave prompts without spread out of the update", override="algorithm.filter_groups=true")
        )
        out.append(Remedy(text="Take easier or harder prompts: now all answers to one are right, or all are wrong"))
    return out


def _reward_volatile(seen: Seen, facts: Facts) -> list[Remedy]:
    out: list[Remedy] = []
    if facts.reward_clip is not True:
        out.append(Remedy(text="Clip the reward", override="'reward_model.clip=[-5.0,5.0]'"))
    out.append(Remedy(text="Normalise it", override="reward_model.normalize=running"))
    if facts.explicit is not True:
        out.append(Remedy(text="Take the explicit posture", override="algorithm.use_pf_ppo=true"))
    return out


def _reward_hacking(seen: Seen, facts: Facts) -> list[Remedy]:
    return [
        _stronger_kl(facts),
        Remedy(
            text="Clip the reward, so that one trick cannot pay without end", override="'reward_model.clip=[-1.0,1.0]'"
        ),
        Remedy(text="Read samples of the highest rewards: klimb report RUN, sorted by reward"),
        Remedy(text="Go back to the best checkpoint by eval.metric; it is kept"),
    ]


def _ratio_spikes(seen: Seen, facts: Facts) -> list[Remedy]:
    """Where a phase is passed over once already, its few steps are too large rather than too many."""
    rate, reuse = _lower_lr(facts, 2), _reuse_less(facts)
    return [rate, *reuse] if facts.ppo_epochs == 1 else [*reuse, rate]


def _engine_mismatch(seen: Seen, facts: Facts) -> list[Remedy]:
    out = [
        Remedy(text="Check that engine and trainer use the same temperature, top_p 1, top_k 0, template and weights"),
        Remedy(text="Check that the engine's weights are the newest: its version is logged with each rollout"),
        Remedy(text="Check both precisions: float32 in the engine for a test"),
    ]
    if facts.engine == "vllm":
        text = "Sample with the trainer's own weights in a new run: if the mismatch is gone, it was the engine"
        out.append(Remedy(text=text, override="actor_rollout_ref.rollout_provider=hf"))
    if facts.explicit is False:
        out.append(Remedy(text="Recompute the old log-probs in the trainer", override="algorithm.use_pf_ppo=true"))
    else:
        out.append(Remedy(text="Correct for what is left", override="algorithm.rollout_correction.weights=token"))
    return out


def _entropy_collapse(seen: Seen, facts: Facts) -> list[Remedy]:
    if seen.variant == "start":
        return [Remedy(text="Sample at a temperature near 1", override="actor_rollout_ref.temperature=1.0")]
    return [
        _lower_lr(facts, 2),
        _stronger_kl(facts),
        Remedy(text="Leave more room for unlikely tokens to rise", override="algorithm.clip_ratio_high=0.28"),
        Remedy(text="Pay for entropy, a little", override="algorithm.entropy_coef=0.001"),
    ]


def _entropy_explosion(seen: Seen, facts: Facts) -> list[Remedy]:
    if seen.variant == "start":
        return [
            Remedy(text="Sample at a temperature near 1", override="actor_rollout_ref.temperature=1.0"),
            Remedy(text="Or check that the model is the SFT model that you meant"),
        ]
    return [_lower_lr(facts, 2), _cooler(facts), _stronger_kl(facts)]


def _length_drift(seen: Seen, facts: Facts) -> list[Remedy]:
    if seen.variant == "longer":
        return [
            Remedy(text="Average so that a long answer does not count more", override="algorithm.loss_agg=token-mean"),
            Remedy(
                text="Take something off for length near the limit", override="'algorithm.truncated={penalty: 0.5}'"
            ),
            Remedy(text="Look at samples: does the reward pay for length?"),
        ]
    return [
        Remedy(text="Look at samples: does the reward pay for brevity, or for giving up?"),
        Remedy(text="Check that answers are not cut off (length/truncated)"),
        _stronger_kl(facts),
    ]


def _truncation(seen: Seen, facts: Facts) -> list[Remedy]:
    now = facts.max_tokens
    override = None if now is None else f"actor_rollout_ref.max_tokens={2 * now}"
    return [
        Remedy(text="Raise the limit of a response", override=override, key="actor_rollout_ref.max_tokens"),
        Remedy(text="Do not train on answers that were cut off", override="algorithm.truncated=exclude"),
        Remedy(text="Check that the model's end token is among the ids that end a response (actor_rollout_ref.stop)"),
    ]


def _repetition(seen: Seen, facts: Facts) -> list[Remedy]:
    return [
        _lower_lr(facts, 2),
        _stronger_kl(facts),
        Remedy(text="Take it off the reward: a function that counts repeats, with a negative weight"),
    ]


def _critic_failing(seen: Seen, facts: Facts) -> list[Remedy]:
    lr = facts.critic_lr
    override = None if lr is None else f"critic.lr={_number(max(10 * lr, 1e-5) if lr < 1e-6 else 3 * lr)}"
    return [
        Remedy(
            text="Give the critic a rate that learns" + (f" (it is {lr:g})" if lr is not None else ""),
            override=override,
            key="critic.lr",
        ),
        Remedy(text="Let it learn alone first", override="critic.warmup_phases=5"),
        Remedy(text="Or take an estimator without a critic", override="algorithm.adv_estimator=reinforce_pp"),
    ]


def _coefficient_pinned(seen: Seen, facts: Facts) -> list[Remedy]:
    if seen.variant == "lower":
        low = facts.min_kl_coef
        override = None if low is None else f"algorithm.kl_ctrl.min_kl_coef={_number(low / 10)}"
        return [
            Remedy(text="Lower the clamp", override=override, key="algorithm.kl_ctrl.min_kl_coef"),
            Remedy(text="Or accept it: nothing is wrong as long as the reward rises"),
        ]
    high = facts.max_kl_coef
    override = None if high is None else f"algorithm.kl_ctrl.max_kl_coef={_number(10 * high)}"
    return [_lower_lr(facts, 2), Remedy(text="Raise the clamp", override=override, key="algorithm.kl_ctrl.max_kl_coef")]


def _nonfinite(seen: Seen, facts: Facts) -> list[Remedy]:
    return [
        _lower_lr(facts, 4),
        Remedy(text="Rule out the precision", override="training.dtype=float32"),
        Remedy(text="Clip gradients harder", override="training.max_grad_norm=0.5"),
        Remedy(text="Clip the reward: one huge value is enough", override="'reward_model.clip=[-5.0,5.0]'"),
    ]


FEWER_SLOTS = "Decode fewer answers at once"
FEWER_ACTIVATIONS = "Keep fewer activations"
SMALLER_MICRO = "Smaller micro-batches, as many more of them (the same train batch)"
SMALLER_BUDGET = "A smaller token budget of one forward"
MORE_RANKS = "More ranks: models and optimizer states are divided among them"
OTHER_POSTURE = "Last of all the cached posture, one forward less; alignment may get worse"


def memory_remedies(facts: Facts, part: str) -> list[Remedy]:
    """What to change when memory runs out, least harmful first; the posture last of all. Nothing that several ranks do
    not do."""
    out: list[Remedy] = []
    if part == "rollout":
        out.append(Remedy(text=FEWER_SLOTS, override="actor_rollout_ref.rollout_slots=32"))
    elif facts.checkpointing is not True:
        out.append(Remedy(text=FEWER_ACTIVATIONS, override="training.activation_checkpointing=true"))
    micro, accumulation = facts.micro_batch, facts.accumulation
    if micro is not None and accumulation is not None and micro > 1 and micro % 2 == 0:
        out.append(Remedy(text=SMALLER_MICRO, override=halved_micro(micro, accumulation)))
    alone = facts.several_ranks is not True
    if part == "update" and facts.fallback is not True and alone:
        text = "Or let a run that is short of memory halve them by itself"
        out.append(Remedy(text=text, override="training.micro_batch_fallback=true"))
    out.append(Remedy(text=SMALLER_BUDGET, override="actor_rollout_ref.max_tokens_per_micro_batch=4096"))
    if not alone:
        out.append(Remedy(text=MORE_RANKS))
    if facts.offload is not True and alone:
        text, override = "On a GPU keep in the host's memory what is not at work", " ".join(OFFLOAD)
        out.append(Remedy(text=text, override=override))
    if facts.explicit is not False:
        out.append(Remedy(text=OTHER_POSTURE, override="algorithm.use_pf_ppo=false"))
    return out


def halved_micro(micro: int, accumulation: int) -> str:
    """The override that halves a micro-batch and keeps the train batch."""
    return f"training.micro_batch_size={micro // 2} training.gradient_accumulation_steps={2 * accumulation}"


REMEDIES: dict[str, Callable[[Seen, Facts], list[Remedy]]] = {
    "kl_explosion": _kl_explosion,
    "kl_vanished": _kl_vanished,
    "reward_degenerate": _reward_degenerate,
    "reward_volatile": _reward_volatile,
    "reward_hacking": _reward_hacking,
    "ratio_spikes": _ratio_spikes,
    "engine_mismatch": _engine_mismatch,
    "entropy_collapse": _entropy_collapse,
    "entropy_explosion": _entropy_explosion,
    "length_drift": _length_drift,
    "truncation": _truncation,
    "repetition": _repetition,
    "critic_failing": _critic_failing,
    "coefficient_pinned": _coefficient_pinned,
    "nonfinite": _nonfinite,
    "memory_pressure": lambda seen, facts: memory_remedies(facts, seen.variant),
}
