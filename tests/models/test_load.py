"""What a folder must hold for its role, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
)

from klimb.errors import ModelError
from klimb.models.load import (
    VALUE_HEAD,
    Critic,
    check_head,
    context_limit,
    critic_from,
    freeze,
    frozen_copy,
    load_causal_lm,
    load_critic,
    load_tokenizer,
    model_end_ids,
    pad_id,
)
from tests.tiny_models import ARCHITECTURES, CPU, EOS, VOCAB, byte_tokenizer, peaked, tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    tiny_model(attention_dropout=0.5).to(torch.bfloat16).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def test_weights_are_float32_in_eval_mode_whatever_the_folder_holds(folder: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = load_causal_lm(folder, False, CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_loads_with_the_weights_it_was_saved_with(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path, False, CPU)
    ids = torch.arange(4, 20).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, loaded(input_ids=ids).logits, atol=1e-5)
    assert loaded.num_parameters() == model.num_parameters()


def test_a_tokenizer_without_pad_gets_the_end_token(tmp_path: Path) -> None:
    byte_tokenizer(with_pad=False).save_pretrained(tmp_path)
    assert pad_id(load_tokenizer(tmp_path, False)) == EOS


def test_a_tokenizer_with_neither_pad_nor_end_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(with_pad=False)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="neither a pad nor an end token"):
        load_tokenizer(tmp_path, False)


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "not json"])
def test_a_damaged_tokenizer_is_refused_readably(folder: Path, tmp_path: Path, damage: str) -> None:
    place = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = place / "tokenizer.json"
    if damage == "missing":
        file.unlink()
        (place / "tokenizer_config.json").unlink()
    else:
        text = file.read_text()
        file.write_text({"empty": "", "truncated": text[: len(text) // 2], "not json": "hello"}[damage])
    with pytest.raises(ModelError, match="no tokenizer can be loaded") as error:
        load_tokenizer(place, False)
    assert str(place) in str(error.value)
    assert "\n" not in str(error.value)


def _no_weights(place: Path) -> None:
    (place / "model.safetensors").unlink()


def _truncated(place: Path) -> None:
    data = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(data[: len(data) // 2])


def _garbage(place: Path) -> None:
    (place / "model.safetensors").write_bytes(b"\xff" * 64)


def _empty(place: Path) -> None:
    (place / "model.safetensors").write_bytes(b"")


def _no_config(place: Path) -> None:
    (place / "config.json").unlink()


def _broken_config(place: Path) -> None:
    (place / "config.json").write_text("{")


def _unknown_type(place: Path) -> None:
    _change(place, model_type="nosuchmodel")


def _wider(place: Path) -> None:
    _change(place, intermediate_size=128)


def _deeper(place: Path) -> None:
    _change(place, num_hidden_layers=3)


def _change(place: Path, **values: Any) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **values}))


DAMAGES = [
    _no_weights, _truncated, _garbage, _empty, _no_config, _broken_config, _unknown_type, _wider, _deeper,
]  # fmt: skip


@pytest.mark.parametrize("load", [load_causal_lm, load_critic])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_cannot_play_its_role_is_refused_readably(
    folder: Path, tmp_path: Path, damage: Any, load: Any
) -> None:
    place = Path(shutil.copytree(folder, tmp_path / "copy"))
    damage(place)
    with pytest.raises(ModelError) as error:
        load(place, False, CPU)
    assert str(error.value).startswith(str(place))
    assert len(str(error.value)) < 1000


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for load in (load_causal_lm, load_critic):
        with pytest.raises(ModelError, match="nowhere"):
            load(tmp_path / "nowhere", False, CPU)
    with pytest.raises(ModelError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere", False)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sequence_classifier_is_no_policy(tmp_path: Path, tied: bool) -> None:
    LlamaForSequenceClassification(
        LlamaConfig(**SIZES, num_labels=1, pad_token_id=0, tie_word_embeddings=tied)
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"score|lm_head"):
        load_causal_lm(tmp_path, False, CPU)


def test_a_sequence_classifier_may_lend_its_body_to_a_critic(tmp_path: Path) -> None:
    classifier = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1, pad_token_id=0))
    classifier.save_pretrained(tmp_path)
    critic = load_critic(tmp_path, False, CPU)
    assert torch.equal(critic.body.get_input_embeddings().weight, classifier.get_input_embeddings().weight)
    assert not critic.head.weight.any()


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8, pad_token_id=0, final_logit_softcapping=30.0)),
        (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=8.0)),
        (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.0625)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_a_model_that_changes_its_logits_after_the_head_is_refused(model_class: Any, config: Any, scale: float) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="changes its logits") as error:
        check_head(peaked(model_class(config), scale))
    assert config.model_type in str(error.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_heads_are_accepted(name: str) -> None:
    check_head(tiny_model(name))
    check_head(tiny_model(name, scale=40.0))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_critic_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    critic = critic_from(tiny_model(name))
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(critic.head.weight.shape))
        critic.head.bias.fill_(0.123456789)
    critic.save(tmp_path)
    loaded = load_critic(tmp_path, False, CPU)
    mine, theirs = critic.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert not any(module.training for module in loaded.modules())


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, "other shape"])
def test_a_damaged_value_head_is_refused(tmp_path: Path, content: Any) -> None:
    critic_from(tiny_model()).save(tmp_path)
    if isinstance(content, str):
        critic_from(tiny_model(hidden_size=64)).save(tmp_path / "wide")
        content = (tmp_path / "wide" / VALUE_HEAD).read_bytes()
    (tmp_path / VALUE_HEAD).write_bytes(content)
    with pytest.raises(ModelError, match=VALUE_HEAD):
        load_critic(tmp_path, False, CPU)


def test_actor_critic_and_reference_share_no_weights() -> None:
    model = tiny_model("gpt2")
    critic, reference = critic_from(model), frozen_copy(model)
    places = [{p.data_ptr() for p in m.parameters()} for m in (model, critic, reference)]
    assert len(set.union(*places)) == sum(len(p) for p in places)
    assert isinstance(critic, Critic)
    assert all(p.requires_grad for p in [*model.parameters(), *critic.parameters()])
    assert not any(p.requires_grad for p in reference.parameters())
    assert freeze(reference) is reference


def test_the_context_limit_is_the_shorter_of_positions_and_window() -> None:
    def mistral(window: int | None) -> Any:
        return MistralForCausalLM(MistralConfig(**SIZES, max_position_embeddings=64, sliding_window=window))

    assert context_limit(tiny_model("gpt2")) == 256
    assert context_limit(mistral(None)) == 64
    assert context_limit(mistral(8)) == 8
    qwen = {"sliding_window": 16, "max_window_layers": 0}
    assert context_limit(tiny_model("qwen2", **qwen, use_sliding_window=False)) == 256
    assert context_limit(tiny_model("qwen2", **qwen, use_sliding_window=True)) == 16


def test_end_ids_come_from_the_generation_config() -> None:
    model = tiny_model()
    assert model_end_ids(model) == (EOS,)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [EOS, 3]
    assert model_end_ids(model) == (EOS, 3)
    model.generation_config.eos_token_id = None
    assert model_end_ids(model) == ()
