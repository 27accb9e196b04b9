"""The shape of a model, from its config.json or by a name: how many weights it has, and of what sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from klimb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder. intermediate: width of the feed-forward; gated: it has three matrices and not two; tied: the
    output embedding is the input's; lean: a norm keeps one number of every entry for its backward, not its input too
    (klimb.models.family). Biases and norms are left out: under a thousandth."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocab: int
    tied: bool
    gated: bool = True
    lean: bool = True

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.key_heads * self.head_dim

    @property
    def block(self) -> int:
        """Weights of one block's matrices."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def ends(self) -> int:
        """Inputs and outputs of all matrices of all blocks: weights of an adapter of rank 1 on each."""
        attention = 4 * self.hidden + 2 * self.queries + 2 * self.keys
        return self.layers * (attention + (3 if self.gated else 2) * (self.hidden + self.intermediate))

    @property
    def blocks(self) -> int:
        return self.layers * self.block

    @property
    def embedding(self) -> int:
        """Weights of one embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def body(self) -> int:
        """Weights without the head."""
        return self.blocks + self.embedding

    @property
    def weights(self) -> int:
        return self.body + (0 if self.tied else self.embedding)


ASSUMED: dict[str, Shape] = {
    "1.5b": Shape(
        layers=28,
        hidden=1536,
        intermediate=8960,
        heads=12,
        key_heads=2,
        head_dim=128,
        vocab=151_936,
        tied=True,
    ),
    "7b": Shape(
        layers=28,
        hidden=3584,
        intermediate=18_944,
        heads=28,
        key_heads=4,
        head_dim=128,
        vocab=152_064,
        tied=False,
    ),
    "70b": Shape(
        layers=80,
        hidden=8192,
        intermediate=28_672,
        heads=64,
        key_heads=8,
        head_dim=128,
        vocab=128_256,
        tied=False,
    ),
}
"""By the name that --assume-model takes: the published config.json of Qwen2.5-1.5B, Qwen2.5-7B and Llama-3-70B."""

SOURCES = {"1.5b": "Qwen2.5-1.5B", "7b": "Qwen2.5-7B", "70b": "Llama-3-70B"}

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
"""What each size is called in a config.json."""

PLAIN = ("gpt2", "gpt_neox", "gptj", "opt", "phi", "gpt_bigcode")
"""Kinds of models whose feed-forward is two matrices."""

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models whose blocks are klimb's own (klimb.models.family)."""


def assumed(name: str) -> tuple[Shape, str]:
    """The shape behind --assume-model, a name or the path of a config.json or of its folder, and what it is called."""
    if (known := ASSUMED.get(name.lower())) is not None:
        return known, f"{name.lower()}, the sizes of {SOURCES[name.lower()]}"
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(
            f"--assume-model {name}: no such file and no known size; allowed: {', '.join(ASSUMED)}, or the path of a "
            "model's config.json"
        )
    try:
        return read(path), str(path)
    except ConfigError as error:
        raise ConfigError(f"--assume-model '{name}': {error}; allowed too: {', '.join(ASSUMED)}") from None


def places(path: Path) -> int | None:
    """Of the longest sequence that the model of this folder reads; None where its config.json does not say."""
    try:
        tree = _tree(path / "config.json")
    except ConfigError:
        return None
    window = tree.get("sliding_window") if tree.get("use_sliding_window", True) else None
    said = (tree.get("max_position_embeddings"), window)
    return min((n for n in said if isinstance(n, int) and n > 0), default=None)


def read(path: Path) -> Shape:
    """From a config.json or the folder that holds it. ConfigError naming what is missing in it."""
    file = path / "config.json" if path.is_dir() else path
    return shape_of(_tree(file), str(file))


def _tree(file: Path) -> dict[str, Any]:
    """A text model's keys are its own, or those of its text_config."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a model's config.json: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: holds a {type(found).__name__}; a model's config.json is one object")
    tree = cast(dict[str, Any], found)
    inner = tree.get("text_config")
    return {**tree, **cast(dict[str, Any], inner)} if isinstance(inner, dict) else tree


def shape_of(config: Mapping[str, Any], where: str = "config.json") -> Shape:
    """The keys of Llama and its like, and of GPT-2; what says nothing of key heads has as many as heads."""
    sizes = {name: _size(config, keys, where) for name, keys in NAMES.items()}
    inner = config.get("intermediate_size", config.get("n_inner"))
    head_dim = config.get("head_dim")
    key_heads = config.get("num_key_value_heads")
    kind = str(config.get("model_type", ""))
    return Shape(
        **sizes,
        intermediate=inner if isinstance(inner, int) else 4 * sizes["hidden"],
        key_heads=key_heads if isinstance(key_heads, int) else sizes["heads"],
        head_dim=head_dim if isinstance(head_dim, int) else sizes["hidden"] // sizes["heads"],
        tied=bool(config.get("tie_word_embeddings", kind == "gpt2")),
        gated=kind not in PLAIN,
        lean=kind in FAMILY or kind in PLAIN,
    )


def _size(config: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ConfigError(
        f"{where}: no {' or '.join(keys)} above 0 in it, so the model's memory cannot be counted; "
        "give another shape with --assume-model"
    )
