"""Setups of estimates, from a config as a user writes it."""

from __future__ import annotations

import json
from typing import Any

from klimb.config.counts import count
from klimb.config.load import put_override
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.estimate.setup import Lengths, Models, Setup, make_setup
from klimb.estimate.shapes import Shape

SMALL = Shape(layers=3, hidden=64, intermediate=160, heads=4, key_heads=2, head_dim=16, vocab=500, tied=True)
TEXTS = Lengths(prompt=10.0, longest_prompt=16, response=20.0, longest_response=32)


def config(*overrides: str) -> RunConfig:
    tree: dict[str, Any] = {"actor_rollout_ref": {"model_path": "m", "rollout_batch_size": 64, "max_tokens": 32}}
    for text in ("training.total_episodes=640", *overrides):
        put_override(tree, text)
    return RunConfig.model_validate_json(json.dumps(tree))


def setup(
    *overrides: str,
    shape: Shape = SMALL,
    lengths: Lengths = TEXTS,
    gpu_bytes: float | None = None,
    scorer: bool = False,
) -> Setup:
    c = config(*overrides, *(["reward_model.model_path=rm"] if scorer else []))
    posture = resolve(c)
    return make_setup(c, posture, count(c, posture), Models(actor=shape), lengths, gpu_bytes)
