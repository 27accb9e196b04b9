"""Each piece of advice has a config that earns it, one that does not, and an entry in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from klimb.config import advice
from klimb.config.counts import count
from klimb.config.posture import resolve

from .conftest import MODEL, Load

DOCS = Path(__file__).parents[2] / "docs" / "advice.md"
SOURCE = Path(advice.__file__)
CACHED = "algorithm.use_pf_ppo=false"
ADAPTIVE = "algorithm.kl_ctrl.type=adaptive"
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollouts_per_prompt=4")
NO_KL = "algorithm.use_kl_loss=false"
ONE_STEP = "training.gradient_accumulation_steps=256"


def given(load: Load, *overrides: str) -> list[advice.Advice]:
    config = load(MODEL, *overrides).config
    posture = resolve(config)
    return advice.advise(config, posture, count(config, posture))


def codes(load: Load, *overrides: str) -> set[str]:
    return {item.code for item in given(load, *overrides)}


Keys = tuple[str, ...]
CASES: list[tuple[str, Keys, Keys]] = [
    # code, overrides that earn it, overrides that do not
    ("A-KL-CROSS", ("algorithm.use_kl_in_reward=true",), ()),
    ("A-KL-CROSS", (CACHED, "algorithm.use_kl_in_reward=false", "algorithm.use_kl_loss=true"), (CACHED,)),
    ("A-KL-GRADIENT", ("algorithm.kl_estimator=k1",), ("algorithm.kl_estimator=k1+",)),
    ("A-KL-GRADIENT", ("algorithm.kl_estimator=k3",), ("algorithm.kl_estimator=k2",)),
    ("A-KL-GRADIENT", ("algorithm.kl_estimator=abs",), (CACHED, "algorithm.kl_estimator=abs")),
    ("A-ADAPTIVE-CACHED", (CACHED, ADAPTIVE), (CACHED,)),
    ("A-ADAPTIVE-CACHED", (CACHED, ADAPTIVE), (ADAPTIVE,)),
    ("A-COEF-CACHED", (CACHED, "algorithm.kl_ctrl.init_kl_coef=0.2"), ("algorithm.kl_ctrl.init_kl_coef=0.2",)),
    ("A-COEF-CACHED", (CACHED, "algorithm.kl_ctrl.init_kl_coef=0.009"), (CACHED,)),
    ("A-LAM-CACHED", (CACHED, "algorithm.lam=0.95"), (CACHED,)),
    ("A-LAM-CACHED", (CACHED, "algorithm.lam=0.95"), (CACHED, "algorithm.lam=0.95", *GRPO)),
    ("A-CLIP-CACHED", (CACHED, "reward_model.clip=null"), (CACHED,)),
    ("A-LR-CACHED", (CACHED, "training.lr=1e-6"), (CACHED, "training.lr=5e-7")),
    ("A-LR-CACHED", (CACHED, "training.lr=1e-6"), ("training.lr=1e-6",)),
    ("A-LONG-CACHED", (CACHED, "actor_rollout_ref.max_tokens=8192"), (CACHED, "actor_rollout_ref.max_tokens=8191")),
    (
        "A-LONG-CACHED",
        (CACHED, "actor_rollout_ref.max_tokens=16384"),
        (CACHED, "actor_rollout_ref.max_tokens=16384", "algorithm.kl_ctrl.init_kl_coef=0.05"),
    ),
    ("A-TARGET-KL", ("algorithm.kl_ctrl.target_kl=0.2",), ()),
    ("A-TARGET-KL", ("algorithm.kl_ctrl.target_kl=0.005",), (CACHED, "algorithm.kl_ctrl.target_kl=0.005")),
    ("A-KL-LAG", (), ("algorithm.kl_ctrl.horizon=1000",)),
    ("A-KL-LAG", ("algorithm.kl_ctrl.horizon=5000",), ("algorithm.kl_ctrl.horizon=1000",)),
    ("A-BATCH-RATIO", (), ("training.gradient_accumulation_steps=64",)),
    ("A-BATCH-RATIO", ("training.micro_batch_size=512",), ("training.gradient_accumulation_steps=32",)),
    ("A-NO-EVAL", (), ("data.eval_files=[x.jsonl]",)),
    ("A-FIRST-RUN", (CACHED,), ()),
    ("A-INERT", (*GRPO, "critic.lr=1e-4"), ("critic.lr=1e-4",)),
    (
        "A-CLIP-GSPO",
        ("algorithm.policy_loss=gspo",),
        ("algorithm.policy_loss=gspo", "algorithm.clip_ratio_low=3e-4", "algorithm.clip_ratio_high=4e-4"),
    ),
    ("A-CLIP-GSPO", ("algorithm.policy_loss=gspo", "algorithm.clip_ratio_low=3e-4"), ()),
    (
        "A-MAXRL",
        ("algorithm.adv_estimator=maxrl", "actor_rollout_ref.rollouts_per_prompt=4", "algorithm.use_kl_in_reward=true"),
        ("algorithm.adv_estimator=maxrl", "actor_rollout_ref.rollouts_per_prompt=4"),
    ),
    (
        "A-REINFORCE-STEPS",
        ("algorithm.policy_loss=reinforce",),
        ("algorithm.policy_loss=reinforce", "training.gradient_accumulation_steps=64"),
    ),
    ("A-KL-SPREAD", (CACHED, *GRPO), (CACHED, *GRPO, "algorithm.norm_by_std=false")),
    ("A-KL-SPREAD", (CACHED, "algorithm.adv_estimator=grpo_passk", *GRPO[1:]), GRPO),
    (
        "A-MAXRL",
        ("algorithm.adv_estimator=maxrl", GRPO[1], "algorithm.truncated={penalty: 0.5}"),
        ("algorithm.adv_estimator=maxrl", GRPO[1], "algorithm.truncated=exclude"),
    ),
    ("A-ADAPTIVE-CACHED", (CACHED, "algorithm.kl_ctrl.type=pi"), ("algorithm.kl_ctrl.type=pi",)),
    ("A-TARGET-KL", ("algorithm.kl_ctrl.type=pi", "algorithm.kl_ctrl.target_kl=0.2"), ("algorithm.kl_ctrl.type=pi",)),
    ("A-KL-LAG", (ADAPTIVE,), ("algorithm.kl_ctrl.type=pi",)),
]


@pytest.mark.parametrize(("code", "earns", "does_not"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_advice_is_given_where_it_is_earned(load: Load, code: str, earns: Keys, does_not: Keys) -> None:
    assert code in codes(load, *earns)
    assert code not in codes(load, *does_not)


INERT: list[tuple[str, str, Keys]] = [
    ("algorithm.gamma", "0.9", GRPO),
    ("algorithm.lam", "0.9", GRPO),
    ("algorithm.norm_by_std", "false", ()),
    ("algorithm.gamma", "0.9", ("algorithm.adv_estimator=remax",)),
    ("algorithm.lam", "0.9", ("algorithm.adv_estimator=reinforce_pp",)),
    ("algorithm.norm_by_std", "false", ("algorithm.adv_estimator=opo", *GRPO[1:])),
    ("algorithm.clip_ratio_low", "0.1", ("algorithm.policy_loss=sapo",)),
    ("algorithm.clip_ratio_high", "0.1", ("algorithm.policy_loss=reinforce",)),
    ("algorithm.dual_clip", "null", ("algorithm.policy_loss=cispo",)),
    ("algorithm.dual_clip", "2.0", ("algorithm.policy_loss=gmpo",)),
    ("algorithm.clip_ratio_low", "0.1", (ONE_STEP,)),
    ("algorithm.clip_ratio_high", "0.1", (ONE_STEP,)),
    ("algorithm.dual_clip", "2.0", (ONE_STEP,)),
    ("algorithm.loss_args", "{tau_positive: 2.0}", (ONE_STEP, "algorithm.policy_loss=sapo")),
    ("critic.value_clip", "0.1", (ONE_STEP,)),
    ("algorithm.rollout_correction.cap", "3", ()),
    ("algorithm.rollout_correction.low", "0.1", ()),
    ("algorithm.rollout_correction.low", "0.1", ("algorithm.rollout_correction.weights=token",)),
    ("algorithm.rollout_correction.normalize", "true", ()),
    ("algorithm.rollout_correction.weights", "token", (CACHED,)),
    ("algorithm.rollout_correction.reject", "{criterion: token_veto, lo: 0.1}", (CACHED,)),
    ("algorithm.policy_filtration.power", "3", ()),
    ("algorithm.kl_ctrl.horizon", "9000", ("algorithm.kl_ctrl.type=pi",)),
    ("algorithm.kl_ctrl.allow_both", "true", ()),
    ("algorithm.kl_estimator", "k2", (NO_KL,)),
    ("algorithm.kl_ctrl.horizon", "9000", (CACHED,)),
    ("algorithm.kl_ctrl.target_kl", "0.03", (CACHED,)),
    ("algorithm.kl_ctrl.min_kl_coef", "0.002", (NO_KL,)),
    ("algorithm.kl_ctrl.max_kl_coef", "4", (CACHED,)),
    ("algorithm.kl_ctrl.init_kl_coef", "0.03", (NO_KL,)),
    ("algorithm.kl_ctrl.type", "fixed", (NO_KL,)),
    ("critic.model_path", "x", GRPO),
    ("critic.lr", "1e-4", GRPO),
    ("critic.value_clip", "0.1", GRPO),
    ("critic.warmup_phases", "2", GRPO),
    ("actor_rollout_ref.max_tokens_per_micro_batch", "100", ("actor_rollout_ref.use_dynamic_bsz=false", *GRPO)),
    ("actor_rollout_ref.ref_model_path", "x", (NO_KL,)),
    ("reward_model.reward_batch_size", "8", GRPO),
    ("eval.top_p", "0.5", ("data.eval_files=[x]",)),
    ("eval.before_training", "false", ()),
    ("eval.every_episodes", "10", ()),
    ("eval.max_prompts", "10", ()),
    ("eval.temperature", "1.0", ()),
    ("eval.top_p", "0.9", ()),
    ("eval.top_k", "5", ()),
    ("eval.samples_per_prompt", "2", ()),
    ("eval.metric", "accuracy", ()),
    ("actor_rollout_ref.vllm.memory_share", "0.3", ()),
    ("actor_rollout_ref.vllm.tensor_parallel", "2", ()),
    ("reward_model.timeout_seconds", "5", ()),
    ("reward_model.workers", "5", ()),
    ("training.offload.params", "true", (*GRPO, NO_KL)),
    ("training.offload.params", "true", (*GRPO, "actor_rollout_ref.lora={rank: 4}")),
    ("cluster.address", "auto", ()),
    ("cluster.num_workers", "2", ()),
    ("cluster.max_restarts", "5", ()),
    ("training.num_processes", "2", ("training.trainer=fsdp", "cluster.kind=ray", "cluster.num_workers=4")),
    ("diagnostics.max_interventions", "2", ()),
    ("diagnostics.healthy_every_phases", "5", ("diagnostics.on_alarm=stop",)),
]
READ_BY: dict[str, Keys] = {
    "algorithm.norm_by_std": GRPO,
    "algorithm.loss_args": ("algorithm.policy_loss=sapo",),
    "algorithm.rollout_correction": ("algorithm.rollout_correction.weights=band",),
    "algorithm.policy_filtration": ("algorithm.policy_filtration.strategy=power", *GRPO[1:]),
    "algorithm.kl_ctrl.allow_both": ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=true"),
    "eval": ("data.eval_files=[x]", "eval.temperature=1.0"),
    "actor_rollout_ref.vllm": ("actor_rollout_ref.rollout_provider=vllm",),
    "cluster.max_restarts": ("training.trainer=fsdp",),
    "cluster": ("cluster.kind=ray",),
    "training.num_processes": ("training.trainer=fsdp",),
    "diagnostics": ("diagnostics.on_alarm=rollback",),
    "reward_model.reward_batch_size": ("reward_model.model_path=x",),
    "reward_model": ("reward_model.functions=[{name: regex}]",),
}


@pytest.mark.parametrize(("key", "value", "around"), INERT, ids=[f"{row[0]}-{i}" for i, row in enumerate(INERT)])
def test_a_key_that_nothing_reads_is_named(load: Load, key: str, value: str, around: Keys) -> None:
    found = [a.text for a in given(load, *around, f"{key}={value}") if a.code == "A-INERT"]
    assert len(found) == 1
    assert found[0].startswith(f"{key} is set but nothing reads it here: ")
    assert not found[0].endswith(": ")
    assert "A-INERT" not in codes(load, *around), "a key left alone is no news"
    reader = READ_BY.get(key, READ_BY.get(key.rpartition(".")[0], ()))
    assert "A-INERT" not in codes(load, *reader, f"{key}={value}"), "read in the usual case"


def test_the_factor_the_controller_can_reach(load: Load) -> None:
    """Twenty phases of 1024 at horizon 10,000: (1 + 0.2 * 0.1024) ** 20 = 1.5."""
    config = load(MODEL, "training.total_episodes=20000").config
    assert advice.reach(config, count(config, resolve(config))) == pytest.approx(1.5001, abs=1e-3)


def test_the_recommended_explicit_config_needs_no_advice(load: Load) -> None:
    assert (
        codes(
            load,
            "data.eval_files=[x]",
            "training.gradient_accumulation_steps=64",
            "algorithm.kl_ctrl.horizon=1000",
        )
        == set()
    )


def test_every_code_is_explained_and_nothing_else_is() -> None:
    in_code = set(re.findall(r'"(A-[A-Z-]+)"', SOURCE.read_text()))
    assert in_code == {case[0] for case in CASES}
    headings = re.findall(r"^## (A-[A-Z-]+)$", DOCS.read_text(), re.MULTILINE)
    assert set(headings) == in_code
    assert len(headings) == len(in_code)
    for entry in re.split(r"^## ", DOCS.read_text(), flags=re.MULTILINE)[1:]:
        for part in ("**What**", "**Why**", "**Do**"):
            assert part in entry, entry.splitlines()[0]
