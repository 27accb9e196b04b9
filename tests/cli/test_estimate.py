"""Memory and time in `klimb plan`, as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from klimb import host
from klimb.cli.estimate import Wish
from klimb.cli.prompts import lengths
from klimb.config.load import load_config
from klimb.errors import ConfigError
from klimb.estimate.duration import Pace, kept_pace
from klimb.estimate.shapes import ASSUMED

from .test_cli import ARTICLE, CONFIG, ROOT, klimb, refused

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
    steps = re.findall(r"^  \d\. .*:  (\S+)  -> ([\d.]+) GiB in the \w+(, fits)?$", output, re.MULTILINE)
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


def test_answers_that_the_model_cannot_read_are_told_before_it_is_loaded(recipe: Path, tmp_path: Path) -> None:
    assert "too long" not in klimb("plan", recipe).stdout
    (tmp_path / "model" / "config.json").write_text(json.dumps({**SHAPE, "max_position_embeddings": 256}))
    output = klimb("plan", recipe, "data.max_prompt_tokens=100", "actor_rollout_ref.max_tokens=200").stdout
    assert "too long: a prompt of 100 and a response of 200 tokens need 300 places and the model reads 256" in output
    assert (
        "too long" not in klimb("plan", recipe, "data.max_prompt_tokens=56", "actor_rollout_ref.max_tokens=200").stdout
    )


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
    assert Wish(gpus=1).overrides() == ("training.trainer=single", "training.num_processes=1")


def test_an_engine_that_sleeps_is_in_nobodys_way() -> None:
    """The article's run fits with the first change alone."""
    words = ("--elsewhere", "--gpus", "8", "--gpu-memory", "80", "--assume-model", "7b")
    output = klimb("plan", ARTICLE, *words).stdout
    changes = re.findall(r"^  \d\. .*:  (\S+)  -> [\d.]+ GiB in the reward, fits$", output, re.MULTILINE)
    assert changes == ["training.activation_checkpointing=true"]
    said = "engine: 50% of each GPU (actor_rollout_ref.vllm.memory_share), while answers are written and rewarded"
    assert said in output
    assert "engine: 35.5% of" in klimb("plan", ARTICLE, *words, "actor_rollout_ref.vllm.memory_share=0.355").stdout


def test_an_engine_that_cannot_hold_the_model_is_told() -> None:
    words = ("plan", ARTICLE, "--elsewhere", "--gpus", "8", "--assume-model", "70b", "cluster.kind=ray")
    small = klimb(*words).stdout
    assert "but its weights alone need 131.4 GiB of each, and that is 40.0: raise" in small
    assert "but its weights" not in klimb(*words, "actor_rollout_ref.vllm.tensor_parallel=4").stdout


def test_where_no_number_of_gpus_helps_engines_may() -> None:
    words = (
        "plan",
        ROOT / "recipes" / "arithmetic-grpo.yaml",
        "--gpus",
        "8",
        "--gpu-memory",
        "40",
        "--assume-model",
        "7b",
    )
    alone = klimb(*words).stdout
    assert "(rollout_provider=hf) no number of such GPUs makes it fit" in alone
    found = re.search(
        r"with vLLM engines on Ray it fits on --gpus (\d+): klimb plan ... (\S+) (\S+)$", alone, re.MULTILINE
    )
    assert found is not None
    assert found[1] == "8"
    assert re.search("^fits: ", klimb(*words, found[2], found[3]).stdout, re.MULTILINE)


def test_gpus_on_ray_are_rays_ranks() -> None:
    words = ("--elsewhere", "--gpu-memory", "80", "--assume-model", "7b")
    on_ray = ("cluster.kind=ray", "cluster.num_workers=2")
    output = klimb("plan", ARTICLE, *words, *on_ray, "--gpus", "8").stdout
    assert re.search(r"cluster\.num_workers +8 +override cluster\.num_workers=8", output)
    assert "A-INERT" not in output
    assert table(output) == table(klimb("plan", ARTICLE, *words, "--gpus", "8").stdout)
    fewer = klimb("plan", ARTICLE, *words, *on_ray).stdout
    assert "training.offload.optimizer=true" not in fewer
    assert "with what this version has it fits on --gpus 8" in fewer


def test_an_address_that_ray_finds_is_planned_for(recipe: Path) -> None:
    output = klimb("plan", recipe, "cluster.kind=ray", "cluster.num_workers=2", "cluster.address=auto").stdout
    assert re.search(r"cluster\.address +the Ray cluster that this machine belongs to +auto, override", output)
    assert "memory of each of 2 ranks" in output
    assert "there are on a machine like this one, if Ray puts no other rank there" in output


def test_local_ranks_share_the_machine(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    monkeypatch.setattr("klimb.host.all_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def rank(ranks: int) -> Pace | None:
        words = ("training.trainer=fsdp", f"training.num_processes={ranks}")
        return Wish(rate=0.1).machine(load_config(recipe, words).config).pace

    one = kept_pace(2, 1e11)
    assert [rank(n) for n in (1, 2, 16)] == [one, one.on(1, 2), one.on(1 / 8, 2)]
    assert one.on(1, 2).products == 0.5e11
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a thread has a core to itself as long as there are as many
    one = kept_pace(1, 1e11)
    assert [rank(n) for n in (1, 2, 16)] == [one, one, one.times(1 / 8)]
    on_ray = load_config(recipe, ("cluster.kind=ray", "cluster.num_workers=2", "cluster.address=auto")).config
    assert Wish(rate=0.1).machine(on_ray).pace == one


def test_what_each_local_rank_has_is_said(recipe: Path) -> None:
    ranks = 16 * host.all_cores()
    output = klimb("plan", recipe, "training.trainer=fsdp", f"training.num_processes={ranks}").stdout
    assert f"memory of each of {ranks} ranks" in output
    found = re.search(rf"([\d,.]+) (MiB|GiB) there are for each: {ranks} ranks share this machine's memory", output)
    memory = host.memory()
    assert found is not None
    assert memory is not None
    unit = {"MiB": 2**20, "GiB": 2**30}[found[2]]
    assert float(found[1].replace(",", "")) == pytest.approx(memory / ranks / unit, rel=0.01)
    assert f"on 0.0625 core(s) for each of {ranks} ranks, which share {host.all_cores()}, kept" in output


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
