"""The configs that estimates are judged by: two model sizes, both postures, PPO and GRPO, activation checkpointing on
and off, one and two ranks; and a few of a model as small as the playground's, whose time is calls and little else.
Which six of the former and two of the latter the constants are fitted on is decided by the hash of their names."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FITTED_ON, FITTED_ON_SMALL = 6, 2
SMALL = "0.5m"
WORDS_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama with random weights, embeddings tied."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocab: int


SIZES = {
    SMALL: Size(hidden=128, intermediate=256, layers=2, heads=4, key_heads=4, vocab=2048),
    "3m": Size(hidden=192, intermediate=512, layers=6, heads=6, key_heads=6, vocab=2048),
    "15m": Size(hidden=384, intermediate=1024, layers=6, heads=6, key_heads=2, vocab=12_288),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """episodes: of a phase; group: answers to a prompt; micro: rows of a forward, None: cut by budget tokens; ends:
    mean length at which a response ends by chance, None: at the limit."""

    size: str
    explicit: bool
    ppo: bool
    checkpointing: bool
    ranks: int
    episodes: int
    group: int
    prompt: int
    response: int
    micro: int | None
    steps_per_phase: int
    budget: int
    ends: int | None

    @property
    def name(self) -> str:
        words = ["ppo" if self.ppo else "grpo", "explicit" if self.explicit else "cached", self.size]
        return "-".join(words + ["recompute"] * self.checkpointing + [f"{self.ranks}-ranks"] * (self.ranks > 1))


def cases() -> list[Case]:
    """All of them. Lengths and cuts vary along, so that no constant can stand for them."""
    out = [
        _case(number, size, explicit, ppo, checkpointing, 1)
        for number, (size, explicit, ppo, checkpointing) in enumerate(
            (size, explicit, ppo, checkpointing)
            for size in ("3m", "15m")
            for explicit in (True, False)
            for ppo in (True, False)
            for checkpointing in (False, True)
        )
    ]
    two = [
        ("3m", True, True, False),
        ("3m", False, False, True),
        ("15m", True, False, False),
        ("15m", False, True, True),
    ]
    small = [(True, True, False), (False, True, True), (True, False, True), (False, False, False)]
    out += [_case(number, *kind, 2) for number, kind in enumerate(two)]
    return out + [_case(number, SMALL, *kind, 1) for number, kind in enumerate(small)]


def _case(number: int, size: str, explicit: bool, ppo: bool, checkpointing: bool, ranks: int) -> Case:
    return Case(
        size=size,
        explicit=explicit,
        ppo=ppo,
        checkpointing=checkpointing,
        ranks=ranks,
        episodes={SMALL: 64, "3m": 48, "15m": 16}[size] * ranks,
        group=1 if ppo else 4,
        prompt=(32, 48, 64)[number % 3],
        response=(64, 96, 128)[number % 3 if number % 2 else (number + 1) % 3],
        micro=None if number % 4 == 3 else 8 if number % 4 == 1 else 16,
        steps_per_phase=1 if number % 3 else 2,
        budget=1536,
        ends=48 if number % 4 == 2 else None,
    )


def fitted_names() -> set[str]:
    """Those whose names' hashes come first, of the small model's and of the others'."""
    ordered = sorted(cases(), key=lambda case: hashlib.sha256(case.name.encode()).hexdigest())
    small = [case.name for case in ordered if case.size == SMALL]
    others = [case.name for case in ordered if case.size != SMALL]
    return {*small[:FITTED_ON_SMALL], *others[:FITTED_ON]}


def end_ids(case: Case) -> list[int]:
    """Ids that end a response of a flat distribution at this mean length."""
    vocab = SIZES[case.size].vocab
    return [] if case.ends is None else list(range(3, 3 + vocab // case.ends))


def tree(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """The config of so many phases, with the files of `write_inputs` in folder."""
    rows = case.episodes // case.steps_per_phase // case.ranks
    micro = case.micro if case.micro is not None and rows % case.micro == 0 else rows
    return {
        "actor_rollout_ref": {
            "model_path": str(folder / case.size),
            "rollout_batch_size": case.episodes,
            "rollouts_per_prompt": case.group,
            "temperature": 1.0,
            "max_tokens": case.response,
            "stop": end_ids(case),
            "use_dynamic_bsz": case.micro is None,
            "max_tokens_per_micro_batch": case.budget,
        },
        "algorithm": {"use_pf_ppo": case.explicit, "adv_estimator": "gae" if case.ppo else "grpo"},
        "reward_model": {"functions": [{"name": f"{folder / 'reward.py'}:length"}], "workers": 1},
        "data": {"train_files": [str(folder / f"{case.prompt}.jsonl")]},
        "training": {
            "trainer": "single" if case.ranks == 1 else "fsdp",
            "num_processes": case.ranks,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": rows // micro,
            "activation_checkpointing": case.checkpointing,
            "total_episodes": case.episodes * steps,
            "save_freq": case.episodes * steps,
            "resume": "never",
        },
        "logging": {"tensorboard": False, "samples_per_phase": 0},
        "run": {"dir": str(folder / "runs"), "name": case.name},
    }


def write_inputs(folder: Path) -> None:
    """Models, prompts and the reward of all cases, where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text("def length(prompt, response, answer):\n    return float(len(response) % 7)\n")
    for length in sorted({case.prompt for case in cases()}):
        rows = [" ".join(f"w{1000 + (7 * i + 13 * k) % 1000}" for k in range(length)) for i in range(64)]
        text = "".join(json.dumps({"prompt": row, "answer": "0"}) + "\n" for row in rows)
        (folder / f"{length}.jsonl").write_text(text)
    for name, size in SIZES.items():
        if not (folder / name / "config.json").exists():
            _build(size, folder / name)


def _build(size: Size, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.append(str(Path(__file__).parents[1] / "speed"))
    from machine import word_tokenizer

    torch.manual_seed(WORDS_SEED)
    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.key_heads,
        max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer(size.vocab).save_pretrained(folder)


if __name__ == "__main__":
    chosen = fitted_names()
    for case in cases():
        print("fitted" if case.name in chosen else "judged", case.name, case)
