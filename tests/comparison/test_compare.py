"""Real arms, run one after the other by the command, and finished runs side by side."""

from __future__ import annotations

import csv
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_runs import build_tiny_model, rows, tiny_tree, write_config, write_inputs

KLIMB = Path(sys.executable).parent / "klimb"
FILES = ("compare.csv", "compare.png", "compare.html")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    build_tiny_model(folder / "model")
    write_inputs(folder / "inputs")
    tree = tiny_tree(folder / "model", folder / "inputs", folder / "runs", **{"training.total_episodes": 96})
    del tree["run"]["name"]
    tree["compare"] = {"vary": [{"key": "algorithm.use_pf_ppo", "values": [True, False]}], "every": 4}
    write_config(folder / "recipe.yaml", tree)
    return folder


def klimb(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KLIMB, *words], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def done(home: Path) -> Path:
    """The comparison's folder."""
    result = klimb("compare", home / "recipe.yaml", "--seeds", "2")
    assert result.returncode == 0, result.stderr
    (folder,) = (home / "runs").iterdir()
    (home / "out.txt").write_text(result.stdout)
    return folder


@pytest.mark.slow
def test_a_config_becomes_runs_a_table_and_files(home: Path, done: Path) -> None:
    text = (home / "out.txt").read_text()
    assert "comparison of 2 arms in 4 runs" in text
    assert "algorithm.kl_ctrl.type: adaptive (use_pf_ppo=true), fixed (use_pf_ppo=false)" in text
    assert "run 4 of 4: use_pf_ppo=false, seed 1" in text
    assert all((done / name).stat().st_size > 0 for name in FILES)
    with (done / "compare.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table if row["arm"] == "use_pf_ppo=true" and row["seed"] == "0"] == [
        0,
        4,
        8,
        12,
    ]
    first = rows(done / "use_pf_ppo=true-seed0")[-12:]
    last = next(row for row in table if row["step"] == "12" and row["seed"] == "0")
    assert float(last["reward/mean"]) == pytest.approx(sum(row["reward/mean"] for row in first[-4:]) / 4)


@pytest.mark.slow
def test_arms_saw_the_same_prompts_in_the_same_order(done: Path) -> None:
    """The first phase is sampled before the arms can differ: same prompts, same seeds, same texts."""
    samples = [(done / f"use_pf_ppo={value}-seed0" / "samples.jsonl").read_text() for value in ("true", "false")]
    heads = [[line for line in text.splitlines() if '"step": 1, "kind": "train"' in line] for text in samples]
    assert heads[0] == heads[1]
    assert heads[0]


@pytest.mark.slow
def test_a_finished_comparison_is_shown_again_without_training(home: Path, done: Path) -> None:
    before = {path: path.read_text() for path in done.glob("*/metrics.jsonl")}
    result = klimb("compare", home / "recipe.yaml", "--seeds", "2", "--every", "6")
    assert result.returncode == 0, result.stderr
    assert {path: path.read_text() for path in done.glob("*/metrics.jsonl")} == before
    assert "4 of 4 runs are done" in result.stdout


@pytest.mark.slow
def test_an_arm_alone_ends_with_the_same_numbers(done: Path, tmp_path: Path) -> None:
    result = klimb("train", done / "use_pf_ppo=false-seed1.yaml", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert rows(tmp_path / "use_pf_ppo=false-seed1") == rows(done / "use_pf_ppo=false-seed1")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_was_stopped_goes_on_and_ends_with_the_same_numbers(
    home: Path, done: Path, number: signal.Signals
) -> None:
    shutil.rmtree(home / "runs" / "compare-again", ignore_errors=True)
    words = [KLIMB, "compare", home / "recipe.yaml", "run.name=again"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    log = home / "runs" / "compare-again" / "use_pf_ppo=true-seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out.decode()
    assert "the command that ran them goes on" in out.decode()
    again = klimb(*words[1:])
    assert again.returncode == 0, again.stderr
    for value in ("true", "false"):
        name = f"use_pf_ppo={value}-seed0"
        assert rows(home / "runs" / "compare-again" / name) == rows(done / name)


@pytest.mark.slow
def test_finished_runs_are_compared_as_they_are(done: Path, tmp_path: Path) -> None:
    folders = sorted(path for path in done.iterdir() if path.is_dir())
    result = klimb("compare", *folders, "--every", "6", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "over 2 seeds" in result.stdout
    assert all((tmp_path / name).stat().st_size > 0 for name in FILES)
    assert klimb("compare", folders[0], folders[1]).returncode == 2  # one arm, two seeds
    apart = klimb("compare", done / "use_pf_ppo=true-seed0", done / "use_pf_ppo=false-seed1")
    assert "no seed was run in every arm" in apart.stderr


@pytest.mark.slow
def test_an_arm_that_fails_costs_the_others_nothing(home: Path) -> None:
    """Its reward function breaks in the second arm: the message, exit code 2, and the first arm's table."""
    (home / "breaks.py").write_text("def reward(prompt, response, answer):\n    raise ValueError('broken')\n")
    works, breaks = (f"[{{name: {path}:reward}}]" for path in (home / "inputs" / "reward.py", home / "breaks.py"))
    functions = f"reward_model.functions={works},{breaks}"
    result = klimb("compare", home / "recipe.yaml", "--vary", functions, "--steps", "2", "run.name=broken")
    assert result.returncode == 2
    assert "this arm ended with exit code 2" in result.stderr
    assert "Traceback" not in result.stderr
    assert (home / "runs" / "compare-broken" / "compare.csv").stat().st_size > 0


def test_mistakes_are_answered_before_anything_runs(home: Path) -> None:
    recipe = home / "recipe.yaml"
    cases = {
        ("compare",): "Missing argument",
        ("compare", recipe, "compare.vary=[]"): "nothing is varied",
        ("compare", recipe, "--vary", "algorithm.lam=0.9"): "two or more",
        ("compare", recipe, "--vary", "algorithm.lamm=0.9,1.0"): "did you mean 'algorithm.lam'",
        ("compare", recipe, recipe): "not a run folder",
        ("compare", home / "inputs", home / "model"): "config.yaml",
        ("compare", home / "no=such.yaml"): "no=such.yaml",
        ("compare", recipe, "--vary", f"actor_rollout_ref.model_path={home / 'model'},/nowhere"): "/nowhere",
        ("compare", recipe, "--vary", "training.seed=0,1"): "--seeds",
        ("compare", home / "inputs", "--seeds", "2"): "--seeds goes with a config file",
        ("compare", recipe, "--out", home): "--out goes with run folders",
        ("compare", recipe, "--vary", "training.lr=1e-4,1e-5", "--with-advice"): "vary algorithm.use_pf_ppo",
    }
    before = sorted(home.glob("runs/*"))
    for words, message in cases.items():
        result = klimb(*words)
        assert result.returncode == 2, (words, result.stdout)
        assert message in result.stderr, result.stderr
        assert "Traceback" not in result.stderr
    assert sorted(home.glob("runs/*")) == before
