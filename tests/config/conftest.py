"""A config from YAML text, through the loader that users meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from klimb.config.load import Loaded, load_config

Load = Callable[..., Loaded]
MODEL = "actor_rollout_ref: {model_path: m}\n"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(text, *overrides): writes text to recipe.yaml and loads it."""

    def from_text(text: str = MODEL, *overrides: str) -> Loaded:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return from_text
