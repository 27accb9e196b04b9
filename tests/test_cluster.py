"""Ranks on a real Ray cluster: one worker killed, one of two nodes stopped and started again, and what it refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

import klimb
from klimb import checkpoint
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError
from tests.test_processes import config_of, largest_difference
from tests.tiny_runs import build_tiny_model, rows, write_inputs

pytest.importorskip("ray", reason="needs the extra ray: pip install 'klimb[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]
ON_RAY = {"cluster.kind": "ray"}
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("cluster")
    write_inputs(folder / "inputs")
    return build_tiny_model(folder / "model"), folder / "inputs"


@pytest.fixture(scope="module")
def undisturbed(parts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks without Ray."""
    return klimb.train(config_of(parts, tmp_path_factory.mktemp("alone") / "runs", 2)).folder


def train_command(config: RunConfig, runs: Path) -> list[str]:
    assert config.cluster.kind == "ray"
    return [sys.executable, "-m", "klimb", "train", str(runs.parent / f"{runs.name}.yaml")]


def wait_for_steps(run: Path, process: subprocess.Popen[str], steps: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be disturbed"
        log = run / "metrics.jsonl"
        if log.exists() and len(log.read_text().splitlines()) > steps:
            return
        time.sleep(0.02)
    raise AssertionError("no step was logged in time")


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-3000:]
    return output


def popen(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **QUIET}
    )


def test_a_worker_that_is_killed_costs_nothing_but_time(
    parts: tuple[Path, Path], undisturbed: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    process = popen(train_command(config_of(parts, runs, 2, **ON_RAY), runs))
    wait_for_steps(runs / "run", process, 2)
    workers = [p for p in psutil.Process().children(recursive=True) if "RayTrainWorker" in " ".join(_command(p))]
    assert len(workers) >= 2
    os.kill(workers[-1].pid, signal.SIGKILL)
    finish(process)
    assert rows(runs / "run") == rows(undisturbed)
    assert largest_difference(undisturbed, runs / "run") == 0
    assert not list((runs / "run").glob(".ray*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_ends_its_turn_and_saves(
    parts: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    runs = tmp_path / "runs"
    changes = {"training.save_freq": 10_000, "training.total_episodes": 20_000}
    process = popen(train_command(config_of(parts, runs, 2, **ON_RAY, **changes), runs))
    wait_for_steps(runs / "run", process, 2)
    process.send_signal(number)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output[-3000:]
    saved = [checkpoint.step_of(path) for path in checkpoint.listed(runs / "run" / "checkpoints")]
    assert saved[-1] == rows(runs / "run")[-1]["step"]
    assert not list((runs / "run").glob(".ray*"))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def head() -> Generator[str]:
    """Address of a head node with room for one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = _node("--head", f"--port={port}", "--include-dashboard=false")
    address = f"127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    yield address
    _stop(node)


def _node(*options: str) -> subprocess.Popen[str]:
    ray = Path(sys.executable).with_name("ray")
    return subprocess.Popen(
        [str(ray), "start", *options, "--num-cpus=1", "--block"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **QUIET},
        start_new_session=True,
    )


def _stop(node: subprocess.Popen[str]) -> None:
    """The whole node, as when a host is lost."""
    processes = [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    node.wait(timeout=60)
    # What `ray stop` would do: other clusters of this machine would look for the lost one.
    (Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster").unlink(missing_ok=True)


def test_a_node_that_is_lost_and_comes_back_costs_nothing_but_time(
    parts: tuple[Path, Path], undisturbed: Path, tmp_path: Path, head: str
) -> None:
    runs = tmp_path / "runs"
    second = _node(f"--address={head}")
    try:
        time.sleep(15)  # the head counts a node some seconds after it was started
        process = popen(train_command(config_of(parts, runs, 2, **ON_RAY, **{"cluster.address": head}), runs))
        wait_for_steps(runs / "run", process, 2)
        _stop(second)
        second = _node(f"--address={head}")
        finish(process)
    finally:
        _stop(second)
    assert rows(runs / "run") == rows(undisturbed)
    assert largest_difference(undisturbed, runs / "run") == 0


def test_a_cluster_without_room_or_without_an_answer_is_named(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"cluster\.address is 127\.0\.0\.1:9, where no Ray cluster answers"):
        klimb.train(config_of(parts, tmp_path / "a", 2, **ON_RAY, **{"cluster.address": "127.0.0.1:9"}))
    with pytest.raises(ConfigError, match=r"needs 5000 CPU, but the cluster has"):
        klimb.train(config_of(parts, tmp_path / "b", 2, **ON_RAY, **{"cluster.num_workers": 5000}))
