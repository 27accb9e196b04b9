import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from klimb.errors import ModelError
from klimb.playground import PlaygroundSettings, build_playground, describe, is_current, read_about

TINY = PlaygroundSettings(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    sft_steps=4,
    sft_batch=8,
    rm_steps=3,
    rm_pairs=4,
    eval_prompts=4,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "deep" / "playground"
    stages = []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build_playground(folder, progress=lambda *call: stages.append(call), settings=TINY)
    assert torch.equal(before, torch.get_rng_state())
    return folder, stages


def test_folder_is_whole(built):
    folder, _ = built
    assert sorted(p.name for p in folder.iterdir()) == ["playground.json", "reward_model", "sft"]
    assert [p.name for p in folder.parent.iterdir()] == ["playground"]
    about = read_about(folder)
    assert about["settings"]["sft_steps"] == 4
    assert set(about["measured"]) == {"task:arithmetic", "task:instructions", "reward_model_pair_accuracy"}
    assert len(describe(about)) == 3
    assert is_current(folder, TINY)
    assert not is_current(folder)  # other settings: a stale cache


def test_progress_counts_every_step(built):
    _, stages = built
    for stage, total in (("SFT model", 4), ("reward model", 3)):
        assert [call[1] for call in stages if call[0] == stage] == list(range(1, total + 1))
    assert stages[-1][:3] == ("measuring", 3, 3)


def test_models_open_through_the_auto_classes(built):
    folder, _ = built
    tokenizer = AutoTokenizer.from_pretrained(folder / "sft")
    model = AutoModelForCausalLM.from_pretrained(folder / "sft")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert next(model.parameters()).dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    scorer, notes = AutoModelForSequenceClassification.from_pretrained(
        folder / "reward_model", output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert scorer.config.num_labels == 1
    assert scorer.config.pad_token_id == tokenizer.pad_token_id
    assert AutoTokenizer.from_pretrained(folder / "reward_model").get_vocab() == tokenizer.get_vocab()


def test_padding_does_not_change_a_score(built):
    folder, _ = built
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model")
    row = torch.tensor([[1, 4, 9, 30, 2]])
    padded = torch.cat([row, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    with torch.no_grad():
        alone = scorer(input_ids=row, attention_mask=torch.ones_like(row)).logits
        beside = scorer(input_ids=padded, attention_mask=(padded != 0).long()).logits
    assert scorer.config.pad_token_id == 0
    torch.testing.assert_close(alone, beside)


def test_the_same_seed_gives_the_same_weights(built, tmp_path):
    folder, _ = built
    build_playground(tmp_path / "again", progress=lambda *call: None, settings=TINY)
    for name in ("sft", "reward_model"):
        ours, theirs = ((root / name / "model.safetensors").read_bytes() for root in (folder, tmp_path / "again"))
        assert ours == theirs


def test_a_folder_that_is_no_playground_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    with pytest.raises(ModelError, match=r"notes exists and is no playground.*choose another folder"):
        build_playground(tmp_path / "notes", progress=lambda *call: None, settings=TINY)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "x"


def test_a_stale_playground_is_replaced_and_old_leftovers_removed(tmp_path):
    folder = tmp_path / "playground"
    folder.mkdir()
    (folder / "playground.json").write_text(json.dumps({"fingerprint": "old"}))
    leftover = tmp_path / ".playground.building-old"
    leftover.mkdir()
    os.utime(leftover, (1, 1))
    build_playground(folder, progress=lambda *call: None, settings=TINY)
    assert is_current(folder, TINY)
    assert [p.name for p in tmp_path.iterdir()] == ["playground"]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(stage, done, total, note=""):
        if stage == "reward model":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_playground(tmp_path / "playground", progress=fail, settings=TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_leaves_no_folder(tmp_path):
    code = (
        "from pathlib import Path; from klimb.playground import *\n"
        f"build_playground(Path({str(tmp_path / 'playground')!r}), settings=PlaygroundSettings(sft_steps=1_000, "
        "hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, sft_batch=1))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    deadline = time.monotonic() + 120
    while "SFT model" not in process.stdout.readline():
        assert time.monotonic() < deadline
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "playground").exists()
    assert not is_current(tmp_path / "playground")


def test_plain_lines_on_a_pipe(tmp_path, capsys):
    build_playground(tmp_path / "playground", settings=TINY)
    out = capsys.readouterr().out
    assert "SFT model: 4/4" in out
    assert "task:arithmetic: right" in out
    assert "\x1b" not in out
