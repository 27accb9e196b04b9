"""SIGKILL at random moments, in the middle of a save too: the run that was killed ends as the one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from klimb import checkpoint
from tests.tiny_runs import build_tiny_model, rows, tiny_tree, write_config, write_inputs

KLIMB = Path(sys.executable).parent / "klimb"
KILLS = 20


def start(config: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (config.parent / "output.txt").open("ab") as log:
        return subprocess.Popen([KLIMB, "train", config], env=environment, stdout=log, stderr=log)


def wait_for(condition: object, process: subprocess.Popen[bytes], limit: float = 60.0) -> bool:
    """Until the condition holds or the process ends."""
    assert callable(condition)
    end = time.monotonic() + limit
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.002)
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_twenty_times_ends_bit_identical(tmp_path: Path) -> None:
    """Every second kill waits for a save to be under way; the others fall anywhere, start-up included, but not so late
    that a fast machine has ended the run before the last of them."""
    write_inputs(tmp_path / "inputs")
    model = build_tiny_model(tmp_path / "model")
    changes = {"training.total_episodes": 480, "eval.every_episodes": 32, "training.keep_checkpoints": 2}
    whole_tree = tiny_tree(model, tmp_path / "inputs", tmp_path / "whole", **changes)
    killed_tree = tiny_tree(model, tmp_path / "inputs", tmp_path / "killed", **changes)
    whole = write_config(tmp_path / "whole.yaml", whole_tree)
    killed = write_config(tmp_path / "killed.yaml", killed_tree)
    assert start(whole).wait(300) == 0

    rng, folder = random.Random(0), tmp_path / "killed" / "run"
    during_save = 0
    for number in range(KILLS):
        process = start(killed)
        saves = folder / "checkpoints"
        before = {p.name for p in checkpoint.listed(saves)}
        if number % 2:
            wait_for(lambda: {p.name for p in checkpoint.listed(saves)} - before, process)  # noqa: B023
            wait_for(lambda: any(saves.glob("*.tmp")), process)  # noqa: B023
            time.sleep(rng.uniform(0, 0.02))
        else:
            wait_for(lambda: len({p.name for p in checkpoint.listed(saves)} - before) > 1, process, rng.uniform(0.5, 9))  # noqa: B023
            time.sleep(rng.uniform(0, 0.05))
        assert process.poll() is None, (tmp_path / "output.txt").read_text()[-2000:]
        process.send_signal(signal.SIGKILL)
        process.wait()
        during_save += any(saves.glob("*.tmp"))
    assert during_save >= 5, "the kills must hit saves"
    assert start(killed).wait(300) == 0, (tmp_path / "output.txt").read_text()[-2000:]

    expected = tmp_path / "whole" / "run"
    last = checkpoint.listed(expected / "checkpoints")[-1].name
    for name in ("actor/model.safetensors", "critic/model.safetensors", "critic/value_head.safetensors"):
        assert (folder / "checkpoints" / last / name).read_bytes() == (
            expected / "checkpoints" / last / name
        ).read_bytes(), name
    assert (folder / "samples.jsonl").read_bytes() == (expected / "samples.jsonl").read_bytes()
    assert rows(folder) == rows(expected)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs")
    model = build_tiny_model(tmp_path / "model")
    changes = {"training.total_episodes": 240, "training.save_freq": 10_000, "data.eval_files": []}
    config = write_config(tmp_path / "run.yaml", tiny_tree(model, tmp_path / "inputs", tmp_path / "runs", **changes))
    folder = tmp_path / "runs" / "run"
    process = start(config)
    metrics = folder / "metrics.jsonl"
    assert wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    stopped = len(rows(folder))
    assert 3 <= stopped < 30
    assert len(checkpoint.listed(folder / "checkpoints")) == 1
    assert "the same command goes on from there" in (tmp_path / "output.txt").read_text()
    assert start(config).wait(120) == 0
    assert [row["step"] for row in rows(folder)] == list(range(1, 31))
