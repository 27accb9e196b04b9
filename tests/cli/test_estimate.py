"""Memory and time in `klimb plan`, as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from klimb.cli.estimate import Wish
from klimb.cli.prompts import lengths
from klimb.config.load import load_config
from klimb.errors import ConfigError
from klimb.estimate.shapes import ASSUMED

from .test_cli import ARTICLE, CONFIG, klimb, refused

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "tie_word_embeddings": True,
    "model_type": "llama",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A config whose model folder holds sizes only."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    path = tmp_path / "recipe.yaml"
    path.write_text(CONFIG.replace("/nowhere/sft", str(model)))
    return path


def table(output: str) -> dict[str, list[str]]:
    """The memory table's rows by phase, and its head."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(r"(GiB|MiB) ", line) and line.endswith("together"))
    rows = [line.split() for line in lines[start : lines.index("", start)]]
    return {row[0]: row[1:] for row in rows}


def test_the_articles_config_gets_a_full_plan() -> None:
    output = klimb("plan", ARTICLE, "--elsewhere", "--gpus", "8", "--gpu-memory", "80", "--assume-model", "7b").stdout
    rows = table(output)
    assert rows["GiB"] == ["weights", "optimizer", "gradients", "activations", "head", "gathered", "engine", "together"]
    assert list(rows) == ["GiB", "rollout", "reward", "score", "update"]
    weights = (2 * ASSUMED["7b"].weights + 2 * ASSUMED["7b"].body) * 4 / 8 / 2**30
    assert float(rows["rollout"][0]) == pytest.approx(weights, abs=0.06)
    assert re.search(r"does not fit: the update needs \d+, 80\.0 GiB there are", output)
    steps = re.findall(r"^  \d\. .*:  (\S+)  -> ([\d.]+) GiB in the update(, fits)?$", output, re.MULTILINE)
    assert steps[0][0] == "training.activation_checkpointing=true"
    assert steps[-1][2] == ", fits"
    assert float(steps[-1][1]) <= 80
    assert re.search(r"^time: [\d.]+ min a step: rollout .*, reward .*, score .*, update ", output, re.MULTILINE)
    assert re.search(r"^  [\d.]+ h for 20 steps", output, re.MULTILINE)
    assert "assumed, not measured: an A100's published 312 TFLOP/s" in output
    assert re.search(r"training\.num_processes +8 +override training\.num_processes=8", output)


def test_the_changes_that_are_printed_make_it_fit() -> None:
    words = ("--elsewhere", "--gpus", "8", "--gpu-memory", "80", "--assume-model", "7b")
    output = klimb("plan", ARTICLE, *words).stdout
    overrides = re.findall(r"^  \d\. .*:  (\S+)  -> ", output, re.MULTILINE)
    assert overrides
    assert re.search(
        r"^fits: [\d.]+ of the 80\.0 GiB there are$", klimb("plan", ARTICLE, *overrides, *words).stdout, re.M
    )


def test_this_machine_is_planned_for_by_default(recipe: Path) -> None:
    output = klimb("plan", recipe).stdout
    rows = table(output)
    assert {"rollout", "score", "update"} < set(rows)
    assert re.search(r"fits: [\d,.]+ of the [\d,.]+ MiB there are", output)
    assert "responses of 2,048 tokens" in output
    assert "responses of 1,024 tokens on average, taken as 50% of max_tokens" in output
    assert "on 1 core(s), kept from another machine: --measure, --rate" in output


def test_said_lengths_and_rates_are_taken(recipe: Path) -> None:
    def seconds(*words: str) -> float:
        found = re.search(r"^time: ([\d.]+) (s|min|h) a step", klimb("plan", recipe, *words).stdout, re.MULTILINE)
        assert found is not None
        return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]

    short = ("--response-tokens", "100", "--prompt-tokens", "50")
    assert seconds(*short) < 0.5 * seconds()
    assert seconds(*short, "--rate", "0.01") > 1.5 * seconds(*short, "--rate", "1")


def test_a_model_that_is_not_here_needs_one_to_be_assumed(recipe: Path) -> None:
    text = recipe.read_text()
    recipe.write_text(text.replace("model_path: ", "model_path: /nowhere"))
    assert "memory and time: not told" in klimb("plan", recipe, "--elsewhere").stdout
    (recipe.parent / "other.json").write_text(json.dumps(SHAPE))
    output = klimb("plan", recipe, "--elsewhere", "--assume-model", recipe.parent / "other.json").stdout
    assert "together" in output
    assert "no known size; allowed: 1.5b, 7b, 70b" in refused("plan", recipe, "--elsewhere", "--assume-model", "8b")


def test_more_gpus_are_named_where_no_change_suffices(recipe: Path) -> None:
    words = ("--elsewhere", "--gpus", "1", "--gpu-memory", "80", "--assume-model", "7b")
    output = klimb("plan", recipe, *words).stdout
    assert re.search(r"these do not suffice: [\d.]+ GiB are missing", output)
    found = re.search(r"with what this version has it fits on --gpus (\d+)", output)
    assert found is not None
    assert int(found[1]) in (2, 4, 8, 16)


def test_what_measures_this_machine_excludes_what_speaks_of_another() -> None:
    with pytest.raises(ConfigError, match="--measure measures this machine"):
        Wish(measure=True, gpus=2)
    assert "--measure measures this machine" in refused("plan", ARTICLE, "--elsewhere", "--measure", "--rate", "1")
    assert Wish(gpus=1).overrides == ("training.trainer=single", "training.num_processes=1")


@pytest.mark.slow
def test_the_rate_of_this_machine_can_be_measured(recipe: Path) -> None:
    assert re.search(r"products at \d+ GFLOP/s on 1 core\(s\), measured now", klimb("plan", recipe, "--measure").stdout)


def test_prompts_are_measured_where_they_can_be_read(recipe: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = load_config(recipe).config
    model = tmp_path / "model"
    assert lengths(config, model) is None  # no tokenizer.json
    backend = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(model / "tokenizer.json"))
    found = lengths(config, model)
    assert found is not None
    assert 2 < found[0] <= found[1] < 20
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a b c"}\n{"prompt": [{"role": "user", "content": "a b c d e"}]}\n')
    of_file = load_config(recipe, [f"data.train_files=[{rows}]"]).config
    assert lengths(of_file, model) == (4.0, 5)
    rows.write_text("not json\n")
    assert lengths(of_file, model) is None
    (model / "tokenizer.json").write_text("{}")
    assert lengths(config, model) is None
