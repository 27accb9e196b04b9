"""Memory that runs out, for real where an allocator refuses, and by a kill that the kernel has counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import klimb
from klimb import exhaustion, loop
from klimb.clock import Clock, Exhausted
from klimb.doctor.finding import Facts
from klimb.exhaustion import NAME, LastWords, OutOfMemory, Words, explain, kills, left_behind, obituary
from klimb.malloc import is_exhausted
from klimb.rollout.hf import HFSampler
from tests.tiny_runs import build_tiny_model, rows, tiny_config, tiny_tree, write_config, write_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    write_inputs(folder / "inputs")
    return build_tiny_model(folder / "model"), folder / "inputs"


def refused() -> Any:
    """More than any machine has."""
    return torch.empty(2**50, dtype=torch.float32)


def test_what_torch_and_python_raise_is_recognised_and_nothing_else() -> None:
    with pytest.raises(RuntimeError) as caught:
        refused()
    assert is_exhausted(caught.value)
    assert is_exhausted(MemoryError())
    assert is_exhausted(torch.OutOfMemoryError("CUDA out of memory"))
    for text in (
        "CUDA error: out of memory\nCUDA kernel errors might be",
        "CUDA Error: out of memory at csrc/cumem.cpp",
    ):
        assert is_exhausted(RuntimeError(text))
    assert is_exhausted(RuntimeError("could not create a primitive\n"))
    assert not is_exhausted(RuntimeError("could not create a primitive descriptor for a convolution"))
    assert not is_exhausted(RuntimeError("the mailbox is out of memory cards"))
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2) @ torch.zeros(3)
    assert not is_exhausted(other.value)


def test_the_clock_names_the_part_and_its_peaks() -> None:
    said: list[str] = []
    clock = Clock(CPU, said.append)
    with clock("rollout"):
        pass
    with pytest.raises(Exhausted) as caught, clock("update"):
        refused()
    assert caught.value.part == "update"
    assert set(caught.value.peaks) == {"rollout", "update"}
    assert said == ["rollout", "update"]
    with pytest.raises(RuntimeError, match="other"), clock("update"):
        raise RuntimeError("other")


def test_a_run_that_is_refused_memory_names_phase_peaks_and_remedies(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = loop.update, 0

    def update(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return refused() if calls == 3 else whole(*args)

    monkeypatch.setattr(loop, "update", update)
    config = tiny_config(*parts, tmp_path / "runs")
    with pytest.raises(OutOfMemory) as caught:
        klimb.train(config)
    text = str(caught.value)
    assert text.startswith("memory ran out in the phase 'update' (there are ")
    measured = text[text.index("measured peaks:") : text.index("estimated (klimb plan):")].splitlines()[1:]
    assert [line.split()[0] for line in measured] == ["rollout", "score", "update"]
    assert [line.endswith("GiB   <- here") for line in measured] == [False, False, True]
    order = ["activation_checkpointing=true", "micro_batch_size=1 training.gradient_acc", "use_pf_ppo=false"]
    assert [text.index(word) for word in order] == sorted(text.index(word) for word in order)
    assert "alignment may get worse" in text
    planned = text[text.index("estimated (klimb plan):") : text.index("try, in this order:")].splitlines()
    assert [line.split()[0] for line in planned[2:]] == ["rollout", "score", "update"]
    assert [line.endswith("<- here") for line in planned[2:]] == [False, False, True]
    monkeypatch.setattr(loop, "update", whole)
    assert klimb.train(config).finished
    assert not (tmp_path / "runs" / "run" / NAME).exists()


@pytest.mark.parametrize("at", [1, 3])
def test_weights_that_find_no_room_in_the_engine_are_the_rollouts(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before the first turn, and behind the second one's update."""
    calls = 0

    def load_weights(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp")

    monkeypatch.setattr(HFSampler, "load_weights", load_weights)
    with pytest.raises(OutOfMemory, match="memory ran out in the phase 'rollout'"):
        klimb.train(tiny_config(*parts, tmp_path / "runs", **{"eval.before_training": False}))
    assert len(rows(tmp_path / "runs" / "run")) == max(0, at - 2)


def test_remedies_of_the_rollout_are_others_than_those_of_the_update() -> None:
    assert "rollout_slots=32" in explain("rollout", {}, None, Facts())
    assert "activation_checkpointing" not in explain("rollout", {}, None, Facts())
    assert "activation_checkpointing" not in explain("update", {}, None, Facts(checkpointing=True))
    assert "use_pf_ppo" not in explain("update", {}, None, Facts(explicit=False))


GROUP = Path("/sys/fs/cgroup/memory/klimb-test-of-a-kill")
SMALL = """
    import sys
    import klimb
    from klimb import loop
    from klimb.config.schema import RunConfig

    if __name__ == "__main__":
        whole, calls, hoard = loop.update, 0, []

        def update(*args):
            global calls
            calls += 1
            if calls == 4:
                open(sys.argv[2] + "/cgroup.procs", "w").write("0")
                while True:
                    hoard.append(bytearray(b"x" * 2**24))
            return whole(*args)

        loop.update = update
        klimb.train(RunConfig.load(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_process_that_the_kernel_really_kills_is_recognised(
    parts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a control group of 64 MiB, where the machine lets a test make one."""
    try:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "memory.limit_in_bytes").write_text(str(2**26))
    except OSError:
        pytest.skip("no control group of version 1 can be made here")
    try:
        config = write_config(tmp_path / "c.yaml", tiny_tree(*parts, tmp_path / "runs", **{"training.save_freq": 16}))
        (tmp_path / "small.py").write_text(textwrap.dedent(SMALL))
        done = subprocess.run(
            [sys.executable, str(tmp_path / "small.py"), str(config), str(GROUP)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
    finally:
        GROUP.rmdir()
    assert klimb.train(klimb.RunConfig.load(config)).finished
    assert "step 4, phase 'update'; the kernel killed 1 process(es) for want of memory" in capsys.readouterr().out


KILLED = """
    import os, signal, sys
    import klimb
    from klimb import loop
    from klimb.config.schema import RunConfig

    if __name__ == "__main__":
        whole, calls = loop.update, 0

        def update(*args):
            global calls
            calls += 1
            if calls == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args)

        loop.update = update
        klimb.train(RunConfig.load(sys.argv[1]))
"""


def killed(parts: tuple[Path, Path], tmp_path: Path) -> Path:
    """A run that was killed in its fourth update. Its config."""
    config = write_config(tmp_path / "c.yaml", tiny_tree(*parts, tmp_path / "runs", **{"training.save_freq": 16}))
    (tmp_path / "killed.py").write_text(textwrap.dedent(KILLED))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "killed.py"), str(config)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    return config


@pytest.mark.slow
def test_a_kill_by_the_kernel_is_recognised_at_the_next_start(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = killed(parts, tmp_path)
    words = left_behind(tmp_path / "runs" / "run")
    assert words is not None
    assert (words.step, words.part) == (4, "update")
    counter = tmp_path / "vmstat"
    counter.write_text(f"pgfault 12\noom_kill {(words.kills or 0) + 1}\n")
    monkeypatch.setattr(exhaustion, "COUNTERS", (tmp_path / "none", counter))
    assert klimb.train(klimb.RunConfig.load(config)).finished
    out = capsys.readouterr().out
    assert "ended without a word in step 4, phase 'update'; the kernel killed 1 process(es) for want of memory" in out
    assert "update   " in out
    assert "<- here" in out
    assert left_behind(tmp_path / "runs" / "run") is None


@pytest.mark.slow
def test_a_kill_that_the_kernel_did_not_count_is_somebody_elses(
    parts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = killed(parts, tmp_path)
    if kills() is None:
        pytest.skip("this kernel does not count its kills")
    assert klimb.train(klimb.RunConfig.load(config)).finished
    assert "without a word" not in capsys.readouterr().out


def test_where_nobody_counts_both_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustion, "COUNTERS", ())
    text = obituary(Words(step=3, part="rollout", kills=None), {"rollout": 2.0**30}, 2.0**31, Facts())
    assert text is not None
    assert "if nobody killed it, memory ran out" in text
    assert "rollout     1.000 GiB   <- here" in text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "x"}', '{"step": 1}'])
def test_damaged_words_say_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    assert left_behind(tmp_path) is None
    words = LastWords(tmp_path)
    words.say(2, "score")
    assert json.loads((tmp_path / NAME).read_text())["part"] == "score"
    words.end()
    words.end()
    assert left_behind(tmp_path) is None
