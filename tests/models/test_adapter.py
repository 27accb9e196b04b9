"""A policy that starts from a trained adapter has it in its reference too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import klimb
from klimb.algos.kl import estimate
from klimb.errors import ConfigError, ModelError
from klimb.models.load import frozen_copy, load_causal_lm, with_adapter
from tests.tiny_models import CPU
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft

Rows = list[list[float]] | None


def two_logits(folder: Path) -> Path:
    """A model whose last hidden state is [1, 1] whatever it reads, and whose head is the identity."""
    sizes: dict[str, Any] = {
        "vocab_size": 2, "hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "embed" in name or name == "model.norm.weight" else 0.0)
        model.lm_head.weight.copy_(torch.eye(2))
    model.save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, a: Rows = None, b: Rows = None) -> Path:
    """A rank-one adapter on the head (given a and b) or on all attention, with random weights."""
    target = ["lm_head"] if a is not None else ["q_proj", "v_proj"]
    tuned: Any = get_peft_model(
        LlamaForCausalLM.from_pretrained(base), LoraConfig(r=1, lora_alpha=1, target_modules=target)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_A" in name:
                parameter.copy_(torch.tensor(a) if a else torch.randn(parameter.shape, generator=generator))
            if "lora_B" in name:
                parameter.copy_(torch.tensor(b) if b else torch.randn(parameter.shape, generator=generator))
    tuned.save_pretrained(folder, save_embedding_layers=False)
    return folder


def test_case_RM_01_the_reference_of_a_trained_adapter_has_the_adapter(tmp_path: Path) -> None:
    base = two_logits(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", [[1.0, 0.0]], [[0.5], [0.0]])
    policy = with_adapter(load_causal_lm(base, False, CPU), adapter)
    reference = frozen_copy(policy)
    ids = torch.tensor([[0, 1]])
    for model in (policy, reference):
        assert model(ids).logits[0, -1].detach().tolist() == pytest.approx([1.5, 1.0], abs=1e-5)
    of_policy, of_reference, of_base = (
        m(ids).logits[0, -1].detach().log_softmax(-1) for m in (policy, reference, load_causal_lm(base, False, CPU))
    )
    assert float((of_policy.exp() * estimate("k1", of_policy, of_reference)).sum()) == pytest.approx(0.0, abs=1e-6)
    off = float((of_policy.exp() * estimate("k1", of_policy, of_base)).sum())
    assert off == pytest.approx(0.03029986198077, abs=1e-5), "what switching the adapter off would show"
    assert all(p.requires_grad for p in policy.parameters())
    assert not any(p.requires_grad for p in reference.parameters())


def test_a_run_from_an_adapter_starts_at_its_reference_and_trains(tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs")
    base = build_tiny_model(tmp_path / "model")
    adapter = save_adapter(base, tmp_path / "adapter")
    changes = {"actor_rollout_ref.adapter_path": str(adapter), "training.total_episodes": 16, "data.eval_files": []}
    first, second = rows(klimb.train(tiny_config(base, tmp_path / "inputs", tmp_path / "runs", **changes)).folder)
    assert first["kl/k3"] == 0.0
    assert second["kl/k3"] > 0.0
    plain = {**changes, "actor_rollout_ref.adapter_path": None, "run.name": "plain"}
    other = rows(klimb.train(tiny_config(base, tmp_path / "inputs", tmp_path / "runs", **plain)).folder)[0]
    assert not math.isclose(other["policy/entropy"], first["policy/entropy"], rel_tol=1e-3), "the adapter changes it"


def test_a_folder_that_is_no_adapter_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs")
    base = build_tiny_model(tmp_path / "model")
    for path, word in ((base, "holds no adapter_config.json"), (tmp_path / "adaptr", "no such folder")):
        config = tiny_config(
            base, tmp_path / "inputs", tmp_path / "runs", **{"actor_rollout_ref.adapter_path": str(path)}
        )
        with pytest.raises(ConfigError, match=f"actor_rollout_ref.adapter_path: .*{word}"):
            klimb.train(config)


def test_an_adapter_of_another_model_or_without_safetensors_is_refused(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "model")
    adapter = save_adapter(base, tmp_path / "adapter")
    with pytest.raises(ModelError, match="does not fit"):
        with_adapter(load_causal_lm(two_logits(tmp_path / "small"), False, CPU), adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickles"):
        with_adapter(load_causal_lm(base, False, CPU), adapter)


def test_an_adapter_whose_names_do_not_match_is_refused_and_not_silently_left_out(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "model")
    adapter = save_adapter(base, tmp_path / "adapter")
    place = adapter / "adapter_model.safetensors"
    save_file({k.replace("base_model.model.", "base_model.model.x."): v for k, v in load_file(place).items()}, place)
    with pytest.raises(ModelError, match="missing adapter keys"):
        with_adapter(load_causal_lm(base, False, CPU), adapter)


def test_another_kind_of_peft_folder_is_refused(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "model")
    adapter = save_adapter(base, tmp_path / "adapter")
    place = adapter / "adapter_config.json"
    place.write_text(place.read_text().replace('"LORA"', '"PROMPT_TUNING"'))
    with pytest.raises(ModelError, match="of type PROMPT_TUNING; klimb merges LORA"):
        with_adapter(load_causal_lm(base, False, CPU), adapter)
    place.write_text("[]")
    with pytest.raises(ModelError, match="cannot be read"):
        with_adapter(load_causal_lm(base, False, CPU), adapter)
