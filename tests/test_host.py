"""What the kernel says of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from klimb import host
from klimb.clock import memory_limit


def test_the_limit_is_the_machines_or_the_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = host.memory()
    assert size is not None
    assert size > 2**28
    (tmp_path / "memory.max").write_text("1073741824\n")
    monkeypatch.setattr("klimb.host.CONTAINER", (tmp_path / "memory.max", tmp_path / "v1" / "limit"))
    assert host.memory() == 2**30
    (tmp_path / "groups").write_text("4:cpu,memory:/jobs/7\n3:pids:/x\n0::/\n")
    (tmp_path / "v1" / "jobs" / "7").mkdir(parents=True)
    (tmp_path / "v1" / "jobs" / "7" / "limit").write_text("536870912\n")
    monkeypatch.setattr("klimb.host.GROUPS", tmp_path / "groups")
    assert host.memory() == 2**29
    (tmp_path / "v1" / "jobs" / "7" / "limit").unlink()
    (tmp_path / "memory.max").write_text("max\n")
    assert host.memory() == size


def test_the_clock_takes_the_hosts_limit_on_a_cpu() -> None:
    assert memory_limit(torch.device("cpu")) == host.memory()


def test_cores_are_what_torch_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert host.cores() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert host.cores() >= 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert host.cores() >= 1


def test_processes_that_work_at_once_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klimb.host.all_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [host.cores_each(n) for n in (1, 2, 8)] == [4, 2, 0.5]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [host.cores_each(n) for n in (1, 2, 8)] == [1, 1, 0.5]
    assert host.cores_each(1, threads=3) == 3


def test_a_gpu_is_seen_by_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klimb.host.DEVICES", tmp_path)
    assert not host.has_gpu()
    (tmp_path / "nvidia0").touch()
    assert host.has_gpu()
