"""The sizes of the playground, and the fingerprint that tells a stale cache from a current one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from random import Random

from klimb.tasks.arithmetic import Arithmetic
from klimb.tasks.base import TaughtTask
from klimb.tasks.instructions import Instructions

# Raised when the code below makes other models from the same settings.
VERSION = 1

TAUGHT: tuple[TaughtTask, ...] = (Arithmetic(), Instructions())


@dataclass(frozen=True, kw_only=True)
class PlaygroundSettings:
    """Sizes and lengths of the two trainings.

    One step is one optimizer step: `sft_batch` responses, or `rm_pairs` pairs (two responses each).
    eval_prompts: held-out prompts a task that the finished models are measured on.
    """

    vocab_size: int = 448
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    sft_steps: int = 900
    sft_batch: int = 16
    sft_lr: float = 3.0e-3
    rm_steps: int = 300
    rm_pairs: int = 16
    rm_lr: float = 1.0e-3
    eval_prompts: int = 256
    seed: int = 0


def fingerprint(settings: PlaygroundSettings) -> str:
    """Changes whenever the settings, the builder's version, or what the tasks teach change."""
    rng = Random(0)
    taught = [
        (row.prompt, task.demonstration(row, rng), task.clean(row, rng))
        for task in TAUGHT
        for row in task.rows("train", 100)
    ]
    content = json.dumps([VERSION, asdict(settings), taught], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
