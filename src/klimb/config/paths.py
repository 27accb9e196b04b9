"""Where models lie: a folder, or a name for one that `klimb prepare` put into the cache.

`playground:sft`, `playground:reward_model` and `smollm2:` stand for folders in the cache, so that recipes
hold no machine's paths. The cache is $KLIMB_CACHE, else $XDG_CACHE_HOME/klimb, else ~/.cache/klimb.
"""

from __future__ import annotations

import os
from pathlib import Path

from klimb.errors import ConfigError

PREPARED = {
    "playground:sft": ("playground", "sft"),
    "playground:reward_model": ("playground", "reward_model"),
    "smollm2:": ("smollm2",),
}
"""Name -> place in the cache; the first part is the argument of `klimb prepare`."""


def cache_folder() -> Path:
    if own := os.environ.get("KLIMB_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "klimb"


def model_folder(path: str) -> Path:
    """The folder behind a `model_path`. Does not look whether it exists."""
    if path in PREPARED:
        return cache_folder().joinpath(*PREPARED[path])
    if path.split(":")[0] in {parts[0] for parts in PREPARED.values()} and ":" in path:
        raise ConfigError(f"'{path}': no prepared model of that name; there are: {', '.join(PREPARED)}")
    return Path(path).expanduser()


def missing_model(key: str, path: str) -> str | None:
    """Why a model folder cannot be used, with the remedy, or None when it is there."""
    folder = model_folder(path)
    if (folder / "config.json").is_file():
        return None
    if path in PREPARED:
        return f"{key}: {path} is not prepared yet; run: klimb prepare {PREPARED[path][0]}"
    if folder.is_dir():
        return f"{key}: {folder} holds no config.json; it must be a Hugging Face model folder"
    return f"{key}: no such folder: {folder} (klimb loads local folders only and asks no hub)"
