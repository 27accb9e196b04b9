"""What is refused before torch is imported: engines of later versions, missing paths, no reward."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from klimb.config.paths import cache_folder, check_runnable, missing_model, missing_paths, model_folder
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError, MissingExtra

from .conftest import MODEL, Load


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model folder `m`, a data file and a reward file, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLIMB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "score.py").write_text("def score(response): return 1.0\n")
    return tmp_path


GOOD = ("data.train_files=[train.jsonl]", "reward_model.functions=[{name: exact_answer}]")


def refused(load: Load, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_runnable(load(MODEL, *GOOD, *overrides).config)
    return str(error.value)


def test_a_complete_config_is_runnable(load: Load, here: Path) -> None:
    check_runnable(load(MODEL, *GOOD).config)
    check_runnable(load(MODEL, *GOOD, "reward_model.functions=[{name: score.py:score}]").config)
    check_runnable(load(MODEL, *GOOD, "data.train_files=[task:arithmetic]").config)


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vllm with fsdp": (
        ("actor_rollout_ref.rollout_provider=vllm", "training.trainer=fsdp"),
        ("rollout_provider is vllm and training.trainer is fsdp", "rollout_provider=hf or training.trainer=single"),
    ),
    "an engine over too few ranks": (
        (
            "actor_rollout_ref.rollout_provider=vllm",
            "actor_rollout_ref.vllm.tensor_parallel=2",
            "cluster.kind=ray",
            "cluster.num_workers=3",
        ),
        ("tensor_parallel is 2, but 3 ranks cannot", "cluster.num_workers to a multiple of 2"),
    ),
    "offload on ray": (
        ("cluster.kind=ray", "training.offload.params=true"),
        ("training.offload is set and cluster.kind is ray", "cluster.kind=local"),
    ),
    "offload on ranks": (("training.trainer=fsdp", "training.offload.optimizer=true"), ("training.offload is set",)),
    "fallback on ranks": (
        ("training.trainer=fsdp", "training.micro_batch_fallback=true"),
        ("training.micro_batch_fallback is set", "in one process only"),
    ),
    "model": (
        ("actor_rollout_ref.model_path=mm",),
        ("actor_rollout_ref.model_path: no such folder: mm", "did you mean m?", "asks no hub"),
    ),
    "hub name": (("actor_rollout_ref.model_path=gpt2/base",), ("asks no hub", "nor is there a folder gpt2")),
    "not a model": (("actor_rollout_ref.model_path=.",), ("no config.json", "Hugging Face model folder")),
    "reference": (("actor_rollout_ref.ref_model_path=x",), ("actor_rollout_ref.ref_model_path: no such folder: x",)),
    "critic": (("critic.model_path=x",), ("critic.model_path: no such folder: x",)),
    "reward model": (("reward_model.model_path=x",), ("reward_model.model_path: no such folder: x",)),
    "data": (("data.train_files=[trian.jsonl]",), ("data.train_files: no such file: trian.jsonl", "mean train.jsonl?")),
    "held-out data": (("data.eval_files=[d/e.jsonl]",), ("data.eval_files: no such file: d/e.jsonl", "a folder d")),
    "reward file": (
        ("reward_model.functions=[{name: scroe.py:score}]",),
        ("reward_model.functions.0.name: no such file: scroe.py", "did you mean score.py?"),
    ),
    "no data": (("data.train_files=[]",), ("data.train_files is empty", "task:arithmetic")),
    "no reward": (
        ("reward_model.functions=[]",),
        ("nothing is rewarded", "reward_model.functions=[{name: exact_answer}]"),
    ),
    "only weight 0": (("reward_model.functions=[{name: regex, weight: 0}]",), ("nothing is rewarded",)),
    "no reward for a task": (
        ("reward_model.functions=[]", "data.train_files=[task:arithmetic]"),
        ("reward_model.functions=[{name: task}]",),
    ),
    "unprepared": (
        ("actor_rollout_ref.model_path='playground:sft'",),
        ("playground:sft is not prepared yet", "run: klimb prepare playground"),
    ),
    "unprepared smollm2": (
        ("actor_rollout_ref.model_path='smollm2:'",),
        ("run: klimb prepare smollm2",),
    ),
    "unknown prepared": (
        ("actor_rollout_ref.model_path='playground:stf'",),
        ("'playground:stf'", "playground:sft, playground:reward_model, smollm2:"),
    ),
}


@pytest.mark.parametrize(("overrides", "words"), CASES.values(), ids=CASES.keys())
def test_a_run_that_cannot_start_says_why(
    load: Load, here: Path, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = refused(load, *overrides)
    for word in words:
        assert word in message


def test_all_missing_paths_are_told_at_once(load: Load, here: Path) -> None:
    keys = ("actor_rollout_ref.model_path", "reward_model.model_path")
    message = refused(load, *(f"{key}=nowhere" for key in keys), "data.eval_files=[a, b]")
    assert [line.split(":")[0] for line in message.splitlines()] == [*keys, "data.eval_files", "data.eval_files"]


def test_missing_paths_of_the_article_are_listed(load: Load) -> None:
    config = load("actor_rollout_ref: {model_path: /no/sft}\nreward_model: {model_path: /no/rm}\n").config
    assert [key for key, _ in missing_paths(config)] == ["actor_rollout_ref.model_path", "reward_model.model_path"]


@pytest.mark.parametrize("service", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_told_before_anything_starts(load: Load, here: Path, service: str) -> None:
    with pytest.raises(MissingExtra, match=rf"logging\.{service} needs .*pip install 'klimb\[{service}\]'"):
        check_runnable(load(MODEL, *GOOD, f"logging.{service}=project").config)


def test_vllm_is_asked_for_only_where_it_samples(
    load: Load, here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a package of that name the config is runnable; without one the message says how to get it."""
    wanted = "actor_rollout_ref.rollout_provider=vllm"
    there = tmp_path / "there"
    (there / "vllm").mkdir(parents=True)
    (there / "vllm" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(there)])
    check_runnable(load(MODEL, *GOOD, wanted).config)
    monkeypatch.setattr(sys, "path", [])
    check_runnable(load(MODEL, *GOOD).config)
    with pytest.raises(MissingExtra, match=r"rollout_provider=vllm needs .*pip install 'klimb\[vllm\]'"):
        check_runnable(load(MODEL, *GOOD, wanted).config)


def test_prepared_names_stand_for_folders_in_the_cache(here: Path) -> None:
    assert model_folder("playground:sft") == here / "cache" / "playground" / "sft"
    assert model_folder("smollm2:") == here / "cache" / "smollm2"
    assert missing_model("k", "playground:sft") is not None
    folder = here / "cache" / "playground" / "sft"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert missing_model("k", "playground:sft") is None
    assert model_folder("odd:name") == Path("odd:name"), "a colon alone makes no prepared name"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("KLIMB_CACHE", "~/own")
    assert cache_folder() == Path("/home/me/own")
    monkeypatch.delenv("KLIMB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/klimb")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/me/.cache/klimb")


def test_home_is_expanded(load: Load, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    text = 'actor_rollout_ref: {model_path: "~/m"}\ndata: {train_files: ["~/train.jsonl"]}\n'
    assert missing_paths(load(text).config) == []
    assert isinstance(load(text).config, RunConfig)
