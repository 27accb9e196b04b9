"""What long rows are measured on: 2K, 4K and 8K tokens in both postures, activation checkpointing on and off, GRPO; one
case with a critic; and the config of a whole run with a prompt of nearly 8K tokens.

python benchmarks/long/cases.py FOLDER       # write the models, prompts and the reward there
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTHS = (2048, 4096, 8192)
SHORT_PROMPT = 32
REWARDS = (1.0, 0.0, 0.0, 1.0)
"""Of the four recorded rows; a group without spread would teach nothing."""
POSITIONS = 2 * LENGTHS[-1]
WHOLE_TOKENS, WHOLE_ANSWER, WHOLE_PHASES, WHOLE_EPISODES = 8192, 128, 2, 2
SIZES = ("15m", "tiny")
"""15m: the model of benchmarks/speed. tiny: what a test has time for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """tokens: of the longest row, and the budget of a forward."""

    tokens: int
    explicit: bool
    checkpointing: bool
    ppo: bool = False
    size: str = SIZES[0]

    @property
    def posture(self) -> str:
        return "explicit" if self.explicit else "cached"

    @property
    def name(self) -> str:
        words = ["ppo" if self.ppo else "grpo", self.posture, str(self.tokens)]
        return "-".join(words + ["recompute"] * self.checkpointing)


def cases() -> list[Case]:
    grpo = [
        Case(tokens=tokens, explicit=explicit, checkpointing=checkpointing)
        for tokens in LENGTHS
        for checkpointing in (False, True)
        for explicit in (True, False)
    ]
    return [*grpo, Case(tokens=LENGTHS[-1], explicit=True, checkpointing=True, ppo=True)]


def shapes(tokens: int) -> list[tuple[int, int, int]]:
    """(prompt, its tokens, the answer's) of four rows, the first of them full: two answers to a prompt of 32 tokens,
    two to one that fills half of the longest row."""
    half = tokens // 2
    return [
        (0, SHORT_PROMPT, tokens - SHORT_PROMPT),
        (0, SHORT_PROMPT, tokens // 8),
        (1, half, tokens // 4),
        (1, half, tokens // 64),
    ]


def tree(case: Case, folder: Path) -> dict[str, Any]:
    """The config of one phase of the recorded rows: two optimizer steps, or explicit would skip its pass."""
    return {
        "actor_rollout_ref": {
            "model_path": str(folder / case.size),
            "rollout_batch_size": len(REWARDS),
            "rollouts_per_prompt": 2,
            "temperature": 1.0,
            "max_tokens": case.tokens - SHORT_PROMPT,
            "use_dynamic_bsz": True,
            "max_tokens_per_micro_batch": case.tokens,
        },
        "algorithm": {"use_pf_ppo": case.explicit, "adv_estimator": "gae" if case.ppo else "grpo"},
        "reward_model": {"functions": [{"name": f"{folder / 'reward.py'}:length"}], "workers": 1},
        "data": {"train_files": [str(folder / "long.jsonl")]},
        "training": {
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "activation_checkpointing": case.checkpointing,
            "total_episodes": len(REWARDS),
        },
    }


def whole_tree(folder: Path) -> dict[str, Any]:
    """A real run whose rows have 8,192 tokens when they end at the limit."""
    out = tree(Case(tokens=WHOLE_TOKENS, explicit=True, checkpointing=True), folder)
    out["actor_rollout_ref"] |= {"rollout_batch_size": WHOLE_EPISODES, "max_tokens": WHOLE_ANSWER}
    out["training"] |= {
        "gradient_accumulation_steps": 1,
        "total_episodes": WHOLE_EPISODES * WHOLE_PHASES,
        "save_freq": WHOLE_EPISODES * WHOLE_PHASES,
        "resume": "never",
    }
    out["data"] |= {"max_prompt_tokens": WHOLE_TOKENS}
    return out | {
        "logging": {"tensorboard": False, "samples_per_phase": 0},
        "run": {"dir": str(folder / "runs"), "name": "whole"},
    }


def write_inputs(folder: Path, sizes: tuple[str, ...] = SIZES) -> None:
    """Models, prompts and the reward, where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text("def length(prompt, response, answer):\n    return float(len(response) % 7)\n")
    words = random.Random(0)
    prompts = [
        " ".join(f"w{words.randrange(1000, 30_000)}" for _ in range(WHOLE_TOKENS - WHOLE_ANSWER)) for _ in range(4)
    ]
    rows = "".join(json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in prompts)
    (folder / "long.jsonl").write_text(rows)
    for size in sizes:
        if not (folder / size / "config.json").exists():
            _build(size, folder / size)


def _build(size: str, folder: Path) -> None:
    if size == "15m":
        sys.path.append(str(Path(__file__).parents[1] / "speed"))
        from machine import build_model

        build_model(folder, POSITIONS)
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=POSITIONS, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]))
