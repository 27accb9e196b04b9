"""Ranks in real processes: whole runs come to the same, are stopped and resumed by other numbers of ranks, and survive
the death of one."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import klimb
from klimb import checkpoint
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError, KlimbError, MissingExtra
from klimb.processes import as_started, start
from tests.rank_work import fail_on, meet_again, say_rank
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

ROUNDED = 1e-5
CACHED = {"algorithm.use_pf_ppo": False, "algorithm.kl_ctrl.init_kl_coef": 0.02}
GRPO = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollouts_per_prompt": 4}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    write_inputs(folder / "inputs")
    return build_tiny_model(folder / "model"), folder / "inputs"


def config_of(parts: tuple[Path, Path], runs: Path, ranks: int = 0, **changes: Any) -> RunConfig:
    """A train batch of 4 episodes on one rank and on two, of 3 on three; 0: one process without fsdp."""
    on_ranks = {"training.trainer": "fsdp", "training.num_processes": ranks} if ranks else {}
    shape = {"training.micro_batch_size": 4 // max(ranks, 1), "training.gradient_accumulation_steps": 1}
    if ranks == 3:
        shape["training.micro_batch_size"] = 1
    return tiny_config(*parts, runs, **{**on_ranks, **shape, **changes})


def weights(run: Path, step: int = 6) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / checkpoint.checkpoint_name(step) / "actor" / "model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**CACHED, "actor_rollout_ref.use_dynamic_bsz": False},
        GRPO,
        # Not divided by a group's spread, where that is the KL's rounding alone: noise of 1e-8 over 1e-6.
        {**CACHED, **GRPO, "algorithm.norm_by_std": False},
    ],
    ids=["ppo", "ppo cached, by rows", "grpo", "grpo cached"],
)
def test_a_run_on_two_ranks_is_the_run_of_one(
    parts: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """With live sampling; where probabilities nearly tie a draw may fall the other way later, here none does."""
    alone = klimb.train(config_of(parts, tmp_path / "one", 0, **changes)).folder
    both = klimb.train(config_of(parts, tmp_path / "two", 2, **changes)).folder
    first, second = rows(alone), rows(both)
    assert len(first) == len(second) == 7
    for one, two in zip(first[:3], second[:3], strict=True):
        assert one.keys() == two.keys()
        for key in ("policy/loss", "policy/grad_norm", "kl/k3", "reward/mean", "value/loss", "eval/reward"):
            if key in one:
                assert two[key] == pytest.approx(one[key], rel=ROUNDED, abs=ROUNDED), (one["step"], key)
    assert largest_difference(alone, both) < 1e-4
    opened = AutoModelForCausalLM.from_pretrained(both / "checkpoints" / "step-000006" / "actor")
    assert type(opened).__name__ == "LlamaForCausalLM"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 16}], ids=["all weights", "lora"])
def test_a_run_goes_on_with_other_numbers_of_ranks(
    parts: tuple[Path, Path], tmp_path: Path, lora: dict[str, int] | None
) -> None:
    """16 episodes on 2 ranks, 16 on one, the last 16 on 3, whose train batch is another one: these only go on."""
    changes: dict[str, Any] = {"training.lr_scheduler": "constant"}
    if lora:
        changes["actor_rollout_ref.lora"] = lora
    first, second = {"training.total_episodes": 16}, {"training.total_episodes": 32}
    whole = klimb.train(config_of(parts, tmp_path / "whole", 0, **changes, **second)).folder
    klimb.train(config_of(parts, tmp_path / "pieces", 2, **changes, **first))
    klimb.train(config_of(parts, tmp_path / "pieces", 0, **changes, **second))
    last = klimb.train(config_of(parts, tmp_path / "pieces", 3, **changes))
    assert last.finished
    assert [row["step"] for row in rows(last.folder)] == list(range(7))
    for one, other in zip(rows(whole)[1:5], rows(last.folder)[1:5], strict=True):
        for key in ("policy/loss", "policy/grad_norm", "kl/k3", "value/loss"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), (one["step"], key)


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_nothing_but_time(parts: tuple[Path, Path], tmp_path: Path) -> None:
    undisturbed = klimb.train(config_of(parts, tmp_path / "undisturbed", 2)).folder
    killed: list[int] = []
    watcher = threading.Thread(target=_kill_a_rank, args=(tmp_path / "killed" / "run", killed))
    watcher.start()
    result = klimb.train(config_of(parts, tmp_path / "killed", 2))
    watcher.join()
    assert killed, "the run was over before its rank was killed"
    assert result.finished
    assert rows(result.folder) == rows(undisturbed)
    assert largest_difference(undisturbed, result.folder) == 0


def _ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    return [p for p in launcher.children() if "--multiprocessing-fork" in p.cmdline()]


def _kill_a_rank(run: Path, killed: list[int]) -> None:
    """SIGKILL for the second rank as soon as two steps are logged."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        log = run / "metrics.jsonl"
        if log.exists() and len(log.read_text().splitlines()) >= 3:
            second = max(_ranks_of(psutil.Process()), key=lambda p: p.create_time())
            second.kill()
            killed.append(second.pid)
            return
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_are_asked_to_stop_end_between_two_turns(
    parts: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C reaches the whole group of a terminal, SIGTERM only the process that was started."""
    process, run = _long_run(parts, tmp_path)
    _read_until(process, "step 3 ")
    _send(process, number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output[-2000:]
    assert output.count("stopping after this step") == 1
    saved = [checkpoint.step_of(path) for path in checkpoint.listed(run / "checkpoints")]
    assert saved[-1] == rows(run)[-1]["step"]


@pytest.mark.slow
def test_a_second_signal_ends_ranks_at_once_and_so_does_the_end_of_whoever_started_them(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    process, run = _long_run(parts, tmp_path)
    _read_until(process, "step 2 ")
    ranks = _ranks_of(psutil.Process(process.pid))
    assert len(ranks) == 2
    for rank in ranks:
        rank.suspend()  # in the middle of something that takes long
    _send(process, signal.SIGINT)
    time.sleep(0.5)
    _send(process, signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert not psutil.wait_procs(ranks, timeout=30)[1]
    assert checkpoint.listed(run / "checkpoints") == []

    process, _ = _long_run(parts, tmp_path)
    _read_until(process, "step 2 ")
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=60)
    assert not psutil.wait_procs(ranks, timeout=30)[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_are_still_loading_stop_too(
    parts: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    process, run = _long_run(parts, tmp_path)
    deadline = time.monotonic() + 60
    while len(psutil.Process(process.pid).children()) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    if number == signal.SIGTERM:  # as a scheduler does
        os.killpg(process.pid, number)
    else:
        _send(process, number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output[-2000:]
    assert number == signal.SIGINT or "Traceback" not in output, "Ctrl-C may fall into a rank's imports"
    assert not (run / "metrics.jsonl").exists() or len(rows(run)) <= 1


def _long_run(parts: tuple[Path, Path], tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """Two ranks in a session of their own, and the run's folder."""
    changes = {"training.save_freq": 1000, "training.total_episodes": 2000}
    assert config_of(parts, tmp_path / "runs", 2, **changes).training.num_processes == 2
    process = subprocess.Popen(
        [sys.executable, "-m", "klimb", "train", str(tmp_path / "runs.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return process, tmp_path / "runs" / "run"


def _read_until(process: subprocess.Popen[str], start: str) -> None:
    assert process.stdout is not None
    assert any(line.startswith(start) for line in process.stdout), "the run ended before"


def _send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_comes_first_does_not_meet_those_of_the_start_before() -> None:
    """torch keeps one store for all starts, and in it the addresses of ranks that are dead."""
    assert start(meet_again, (), 2, 0) == [2] * 10


@pytest.mark.slow
def test_torchrun_starts_the_same_program(parts: tuple[Path, Path], tmp_path: Path) -> None:
    config_of(parts, tmp_path / "runs", 2, **{"training.total_episodes": 8})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "klimb"]
    done = subprocess.run(
        [*command, "train", str(tmp_path / "runs.yaml")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for words in ("step 1 |", "batch arithmetic", "done: ", "x 2 rank(s)"):
        assert done.stdout.count(words) == 1, "one rank speaks for all"
    assert [row["step"] for row in rows(tmp_path / "runs" / "run")] == [0, 1]


@pytest.mark.slow
def test_ranks_return_what_the_first_one_did_and_mistakes_end_them_once() -> None:
    assert start(say_rank, ("rank",), 2, 0) == "rank 0 False"
    for rank in (0, 1):
        with pytest.raises(KlimbError, match=f"mistake of rank {rank}"):
            start(fail_on, (rank,), 2, 3)


def test_a_missing_package_is_named_by_another_process_too() -> None:
    """Errors go from rank to rank, and out of Ray's actors, by pickle."""
    error = MissingExtra("vllm", "vllm", "rollout_provider=vllm")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is MissingExtra
    assert str(again) == str(error)


def test_ranks_from_outside_are_counted_or_refused(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of: Callable[..., RunConfig] = lambda **changes: tiny_config(*parts, tmp_path / "runs", **changes)  # noqa: E731
    assert as_started(of()).training.num_processes == 1
    on_ray = as_started(of(**{"cluster.kind": "ray", "cluster.num_workers": 3})).training
    assert (on_ray.trainer, on_ray.num_processes) == ("fsdp", 3)
    assert as_started(of(**{"cluster.kind": "ray"})).training.num_processes == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert as_started(of(**{"training.trainer": "fsdp"})).training.num_processes == 2
    with pytest.raises(ConfigError, match=r"trainer is single, but 2 ranks were started"):
        as_started(of())
    with pytest.raises(ConfigError, match=r"num_processes is 3, but 2 ranks were started"):
        as_started(of(**{"training.trainer": "fsdp", "training.num_processes": 3}))
    for trainer, workers in (("single", None), ("fsdp", 3)):
        both = as_started(of(**{"cluster.kind": "ray", "cluster.num_workers": workers, "training.trainer": trainer}))
        assert (both.training.trainer, both.training.num_processes, both.num_ranks) == ("fsdp", 2, 2)
