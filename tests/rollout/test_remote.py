"""vLLM engines as Ray actors beside the ranks: the run is that of one process, and a lost engine comes back."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

import klimb
from tests.test_cluster import finish, popen, train_command, wait_for_steps
from tests.test_processes import config_of, largest_difference
from tests.tiny_runs import build_tiny_model, rows, write_inputs

MISSING = [name for name in ("ray", "vllm") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)} (make test-vllm)"),
]
BY_VLLM = {"actor_rollout_ref.rollout_provider": "vllm"}
ON_RAY = {**BY_VLLM, "cluster.kind": "ray"}
SOUND = 1e-3
"""Nats between an engine's log-probs and the trainer's, in float32."""
CLOSE = 1e-5


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("remote")
    write_inputs(folder / "inputs")
    return build_tiny_model(folder / "model", head_dim=32), folder / "inputs"


@pytest.fixture(scope="module")
def alone(parts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with vLLM in it."""
    return klimb.train(config_of(parts, tmp_path_factory.mktemp("alone") / "runs", 0, **BY_VLLM)).folder


def on_ray(parts: tuple[Path, Path], runs: Path, **changes: Any) -> Path:
    finish(popen(train_command(config_of(parts, runs, 2, **ON_RAY, **changes), runs)))
    return runs / "run"


def assert_same_run(one: Path, other: Path) -> None:
    first, second = rows(one), rows(other)
    assert len(first) == len(second) == 7
    for before, after in zip(first[1:], second[1:], strict=True):
        assert after["mismatch/max_log_ratio"] < SOUND
        for key in ("reward/mean", "length/mean", "policy/loss", "policy/grad_norm", "kl/k3"):
            assert after[key] == pytest.approx(before[key], rel=CLOSE, abs=CLOSE), (after["step"], key)
    assert largest_difference(one, other) < 1e-4


@pytest.mark.parametrize("width", [1, 2])
def test_two_ranks_with_engines_of_their_own_or_one_together_are_the_run_of_one_process(
    parts: tuple[Path, Path], alone: Path, tmp_path: Path, width: int
) -> None:
    folder = on_ray(parts, tmp_path / "runs", **{"actor_rollout_ref.vllm.tensor_parallel": width})
    assert_same_run(alone, folder)


def test_an_engine_that_cannot_start_ends_the_run_at_once_and_is_named(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    model, runs = build_tiny_model(tmp_path / "odd", head_dim=32, hidden=96, heads=3), tmp_path / "runs"
    together = {**ON_RAY, "actor_rollout_ref.vllm.tensor_parallel": 2}  # which cannot divide three heads
    process = popen(train_command(config_of((model, parts[1]), runs, 2, **together), runs))
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 2, output[-3000:]
    text = " ".join(output.split())
    assert "odd: vLLM cannot be started on this model here: " in text
    assert "rollout_provider=hf samples without vLLM" in text


def test_an_engine_that_is_killed_costs_nothing_but_time(parts: tuple[Path, Path], alone: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = popen(train_command(config_of(parts, runs, 2, **ON_RAY), runs))
    wait_for_steps(runs / "run", process, 2)
    engines = [p for p in psutil.Process().children(recursive=True) if "ray::Engine" in " ".join(p.cmdline())]
    assert len(engines) == 2
    os.kill(engines[-1].pid, signal.SIGKILL)
    finish(process)
    assert_same_run(alone, runs / "run")
