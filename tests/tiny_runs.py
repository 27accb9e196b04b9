"""A model small enough to train in a test, and the config that trains it. Random weights, real parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from klimb.config.schema import RunConfig
from klimb.playground.tokenizer import train_tokenizer

VOLATILE = ("time/", "perf/", "memory/")


def build_tiny_model(
    folder: Path, seed: int = 0, dropout: float = 0.0, head_dim: int = 16, hidden: int = 32, heads: int = 2
) -> Path:
    """Tokenizer and a two-layer model with peaked random weights."""
    texts = [f"What is {a} + {b}? answer: {a + b}" for a in range(12) for b in range(12)]
    train_tokenizer(texts, 120, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        attention_dropout=dropout,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


REWARD = '''
def reward(prompt, response, answer):
    """Graded and learnable by a random model: the share of digits in the text."""
    return sum(c.isdigit() for c in response) / (len(response) or 1)
'''


def write_inputs(folder: Path, num_prompts: int = 12) -> None:
    """Prompt files and a reward function."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, start in (("train", 0), ("eval", 50)):
        table = [
            {"prompt": f"What is {i} + {i % 7}?", "answer": str(i + i % 7)} for i in range(start, start + num_prompts)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (folder / "reward.py").write_text(REWARD)


def tiny_tree(model: Path, inputs: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    """A config of 6 phases of 8 episodes, two optimizer steps each; `changes` by dotted key."""
    tree: dict[str, Any] = {
        "actor_rollout_ref": {
            "model_path": str(model),
            "rollout_batch_size": 8,
            "temperature": 1.0,
            "max_tokens": 12,
            "max_tokens_per_micro_batch": 128,
        },
        "algorithm": {"kl_ctrl": {"horizon": 100.0}},
        "critic": {"lr": 1e-3},
        "reward_model": {"functions": [{"name": f"{inputs / 'reward.py'}:reward"}], "workers": 1},
        "data": {"train_files": [str(inputs / "train.jsonl")], "eval_files": [str(inputs / "eval.jsonl")]},
        "training": {
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "lr": 1e-3,
            "total_episodes": 48,
            "save_freq": 8,
        },
        "eval": {"max_prompts": 4, "every_episodes": 16, "temperature": 1.0},
        "logging": {"tensorboard": False},
        "run": {"name": "run", "dir": str(runs)},
    }
    for key, value in changes.items():
        node = tree
        *parents, leaf = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


def tiny_config(model: Path, inputs: Path, runs: Path, **changes: Any) -> RunConfig:
    return RunConfig.load(write_config(runs.parent / f"{runs.name}.yaml", tiny_tree(model, inputs, runs, **changes)))


def write_config(path: Path, tree: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


def rows(folder: Path, volatile: bool = False) -> list[dict[str, Any]]:
    """metrics.jsonl, without times, rates and memory unless asked for."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if volatile or not k.startswith(VOLATILE)} for row in lines]
