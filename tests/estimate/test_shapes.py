"""Shapes of models: counted weights against real modules, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from klimb.errors import ConfigError
from klimb.estimate.shapes import ASSUMED, assumed, read, shape_of
from klimb.models.load import body_of
from tests.tiny_models import ARCHITECTURES, tiny_model

PUBLISHED = {"1.5b": 1.54e9, "7b": 7.62e9, "70b": 70.6e9}
"""What the models' own pages say."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_assumed_shapes_have_as_many_weights_as_published(name: str) -> None:
    assert ASSUMED[name].weights == pytest.approx(PUBLISHED[name], rel=0.003)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_config_json_gives_the_matrices_of_the_model_it_describes(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    model.config.save_pretrained(tmp_path)
    shape = read(tmp_path)
    matrices = {id(p): p.numel() for p in model.parameters() if p.dim() == 2}
    assert shape.weights == sum(matrices.values())
    assert shape.body == sum(p.numel() for p in body_of(model).parameters() if p.dim() == 2)
    assert assumed(str(tmp_path / "config.json"))[0] == shape


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"llama", "qwen2"}))
def test_older_architectures_are_counted_too(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    model.config.save_pretrained(tmp_path)
    places = sum(p.numel() for name, p in model.named_parameters() if "wpe" in name)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert read(tmp_path).weights == matrices - places


def test_what_cannot_be_counted_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--assume-model 8b: no such file and no known size; allowed: 1\.5b, 7b, 70b"
    ):
        assumed("8b")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "num_hidden_layers": 0}))
    with pytest.raises(ConfigError, match="no num_hidden_layers or n_layer above 0 in it"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as a model's config"):
        read(tmp_path)


def test_sizes_of_a_text_model_inside_another_are_found(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 99, "text_config": sizes}))
    found = read(tmp_path)
    assert (found.hidden, found.intermediate, found.key_heads, found.head_dim) == (8, 32, 2, 4)


@pytest.mark.parametrize(("kind", "lean"), [("llama", True), ("qwen3", True), ("gpt2", True), ("gemma", False)])
def test_norms_of_other_gated_models_keep_their_input_too(kind: str, lean: bool) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10, "model_type": kind}
    assert shape_of(config).lean == lean
