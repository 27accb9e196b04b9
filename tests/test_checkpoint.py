"""Checkpoint folders: whole or not there, newest by number, whatever kills the save."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from klimb import checkpoint
from klimb.errors import CheckpointError


def fill(size: int = 1000, mark: bytes = b"w") -> Callable[[Path], None]:
    def write(place: Path) -> None:
        (place / "actor").mkdir()
        (place / "actor" / "model.safetensors").write_bytes(mark * size)
        (place / "optimizer.pt").write_bytes(b"o" * size)
        (place / "state.json").write_text('{"step": 1}')

    return write


def steps(folder: Path) -> list[int | None]:
    return [checkpoint.step_of(path) for path in checkpoint.listed(folder)]


def test_what_is_written_is_whole_and_sealed(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path / "checkpoints", 3, fill())
    assert path.name == "step-000003"
    assert checkpoint.damage(path) is None
    checkpoint.require_whole(path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["actor/model.safetensors", "optimizer.pt", "state.json"]
    assert manifest["files"]["optimizer.pt"]["bytes"] == 1000
    assert [p.name for p in path.parent.iterdir()] == ["step-000003"]


def test_the_manifest_is_written_last(tmp_path: Path) -> None:
    """While the files are filled in, the place has another name and no manifest."""
    seen: list[tuple[str, bool]] = []

    def look(place: Path) -> None:
        fill()(place)
        seen.append((place.name, (place / "manifest.json").exists()))
        assert checkpoint.newest(tmp_path) == (None, [])

    checkpoint.write(tmp_path, 3, look)
    assert seen == [("step-000003.tmp", False)]


def test_case_CR_03_the_newest_is_the_highest_number(tmp_path: Path) -> None:
    for step in (9000, 10000):
        checkpoint.write(tmp_path, step, fill(10))
    (tmp_path / "step-9000000x").mkdir()
    (tmp_path / "step-020000.tmp").mkdir()
    (tmp_path / "step-030000.abandoned").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert steps(tmp_path) == [9000, 10000]
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-010000", [])


def test_case_CR_03_numbers_beyond_the_padding_sort_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        checkpoint.write(tmp_path, step, fill(10))
    assert steps(tmp_path) == [999_999, 1_000_000]


def test_case_CR_03_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        checkpoint.write(tmp_path, step, fill(10))
        checkpoint.prune(tmp_path, 2, None)
    assert steps(tmp_path) == [10, 11]


def test_pruning_keeps_the_best_and_leaves_foreign_folders(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for step in range(1, 6):
        checkpoint.write(tmp_path, step, fill(10))
        checkpoint.prune(tmp_path, 2, 2)
    assert steps(tmp_path) == [2, 4, 5]
    checkpoint.prune(tmp_path, 1, 5)
    assert steps(tmp_path) == [5]
    assert (tmp_path / "notes").is_dir()


def remove(path: Path) -> None:
    (path / "optimizer.pt").unlink()


def empty(path: Path) -> None:
    (path / "actor" / "model.safetensors").write_bytes(b"")


def flip(path: Path) -> None:
    place = path / "actor" / "model.safetensors"
    data = bytearray(place.read_bytes())
    data[500] ^= 1
    place.write_bytes(bytes(data))


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def half_manifest(path: Path) -> None:
    place = path / "manifest.json"
    place.write_text(place.read_text()[: place.stat().st_size // 2])


def manifest_of(text: str) -> Callable[[Path], None]:
    return lambda path: (path / "manifest.json").write_text(text) and None


def a_folder_for_a_file(path: Path) -> None:
    (path / "optimizer.pt").unlink()
    (path / "optimizer.pt").mkdir()


def a_file_for_the_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a folder")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file is missing": (remove, "optimizer.pt is missing"),
    "a file is empty": (empty, "model.safetensors has 0 bytes, 1000 were written"),
    "a bit is flipped": (flip, "model.safetensors is not what was written"),
    "no manifest": (no_manifest, "never finished"),
    "half a manifest": (half_manifest, "manifest.json cannot be read"),
    "an empty manifest": (manifest_of(""), "manifest.json cannot be read"),
    "a manifest of nothing": (manifest_of('{"files": {}}'), "lists no file"),
    "a manifest of another form": (manifest_of('{"files": {"optimizer.pt": 1000}}'), "cannot be read"),
    "a manifest that is a list": (manifest_of("[]"), "cannot be read"),
    "a folder for a file": (a_folder_for_a_file, "optimizer.pt is missing"),
    "a file for the folder": (a_file_for_the_folder, "cannot be read"),
}


@pytest.mark.parametrize(("break_it", "words"), DAMAGES.values(), ids=DAMAGES.keys())
def test_case_CR_04_a_damaged_newest_is_named_and_the_one_before_is_used(
    tmp_path: Path, break_it: Callable[[Path], None], words: str
) -> None:
    good = checkpoint.write(tmp_path, 3, fill())
    bad = checkpoint.write(tmp_path, 4, fill())
    break_it(bad)
    found, warnings = checkpoint.newest(tmp_path)
    assert found == good
    assert len(warnings) == 1
    assert "step-000004" in warnings[0]
    assert words in warnings[0]
    with pytest.raises(CheckpointError, match=r"step-000004: .*(incomplete|no such checkpoint)") as error:
        checkpoint.require_whole(bad)
    assert "step-000003" in str(error.value), "the message says which one to take"


def test_when_all_are_damaged_there_is_none(tmp_path: Path) -> None:
    for step in (1, 2):
        remove(checkpoint.write(tmp_path, step, fill()))
    found, warnings = checkpoint.newest(tmp_path)
    assert found is None
    assert [("step-000002" in warnings[0]), ("step-000001" in warnings[1])] == [True, True]


def test_a_missing_checkpoint_names_those_that_are_there(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 3, fill())
    with pytest.raises(CheckpointError, match=r"step-000004: no such checkpoint; .* holds: step-000003"):
        checkpoint.require_whole(tmp_path / "step-000004")
    assert checkpoint.newest(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize("broken", [True, False])
def test_saving_over_the_same_number_replaces_it(tmp_path: Path, broken: bool) -> None:
    old = checkpoint.write(tmp_path, 3, fill(mark=b"a"))
    if broken:
        remove(old)
    new = checkpoint.write(tmp_path, 3, fill(mark=b"b"))
    assert new == old
    assert checkpoint.damage(new) is None
    assert (new / "actor" / "model.safetensors").read_bytes()[:1] == b"b"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 576 vs 534")]
)
def test_case_CR_04_a_refused_write_leaves_the_older_ones(tmp_path: Path, error: Exception) -> None:
    """torch reports a full disk as RuntimeError, safetensors in a class of its own."""
    checkpoint.write(tmp_path, 3, fill())
    same = checkpoint.write(tmp_path, 4, fill(mark=b"a"))

    def refuse(place: Path) -> None:
        (place / "half").write_bytes(b"x" * 100)
        raise error

    for step in (5, 4):
        with pytest.raises(CheckpointError, match=r"could not be written: .*step-000003, step-000004\. Free some"):
            checkpoint.write(tmp_path, step, refuse)
    assert steps(tmp_path) == [3, 4]
    assert checkpoint.newest(tmp_path) == (same, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


FULL = """
import sys
from pathlib import Path
from klimb import checkpoint
from klimb.errors import CheckpointError

folder, ways = Path(sys.argv[1]), {}
ways["plain"] = lambda place: (place / "a").write_bytes(bytes(4_000_000))
if sys.argv[2] == "torch":
    import torch
    from safetensors.torch import save_file
    large = torch.zeros(1_000_000)
    ways["torch"] = lambda place: torch.save({"a": large}, place / "a.pt")
    ways["safetensors"] = lambda place: save_file({"a": large}, place / "a.safetensors")
checkpoint.write(folder, 3, lambda place: (place / "small").write_text("x"))
for name, fill in ways.items():
    try:
        checkpoint.write(folder, 4, fill)
    except CheckpointError as error:
        assert "step-000003. Free some space" in str(error), error
    else:
        raise SystemExit(f"{name}: nothing was refused")
    assert [p.name for p in folder.iterdir()] == ["step-000003"]
    assert checkpoint.newest(folder) == (folder / "step-000003", [])
print("refused", len(ways))
"""


def run_full(folder: Path, before: list[str], code: str, what: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", code, str(folder), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_case_CR_04_a_file_limit_refuses_as_a_full_disk_does(tmp_path: Path) -> None:
    limit = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
    )
    result = run_full(tmp_path, [], limit + FULL, "plain")
    assert result.stdout == "refused 1\n", result.stderr


def test_case_CR_04_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """On a file system of one megabyte, mounted in a namespace of its own."""
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$@"'
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"]
    allowed = shutil.which("unshare") and subprocess.run([*inside, "true"], capture_output=True, check=False)
    if not allowed or allowed.returncode:
        pytest.skip("this machine lets nobody mount a file system in a namespace")
    result = run_full(tmp_path, inside, FULL, "torch")
    assert result.stdout == "refused 3\n", result.stderr


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.write(tmp_path / "file", 1, fill())


def test_clean_removes_what_killed_saves_left(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 3, fill())
    for name in ("step-000004.tmp", "step-000003.old.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"x")
    (tmp_path / "step-notes").mkdir()
    checkpoint.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-notes"]


def test_clean_puts_back_what_a_killed_save_had_moved_aside(tmp_path: Path) -> None:
    moved = checkpoint.write(tmp_path, 3, fill())
    moved.rename(tmp_path / "step-000003.old.tmp")
    (tmp_path / "step-000003.tmp").mkdir()
    checkpoint.clean(tmp_path)
    assert checkpoint.newest(tmp_path) == (moved, [])
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


SAVER = """
import sys
from pathlib import Path
from klimb import checkpoint

folder = Path(sys.argv[1])
start, _ = checkpoint.newest(folder)
step = 0 if start is None else checkpoint.step_of(start)
checkpoint.clean(folder)

def fill(place):
    for name in ("actor", "critic"):
        (place / name).mkdir()
        with (place / name / "model.safetensors").open("wb") as file:
            for _ in range(64):
                file.write(step.to_bytes(4, "big") * 4096)
    (place / "state.json").write_text(str(step))

print("ready", flush=True)
while True:
    step += 1
    checkpoint.write(folder, step, fill)
    checkpoint.prune(folder, 2, 1)
"""


@pytest.mark.timeout(300)
def test_case_CR_04_killed_twenty_times_at_any_moment(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.write(folder, 0, fill())
    dice = random.Random(4)
    last, left_behind = -1, 0
    for _ in range(20):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert saver.stdout is not None
        assert saver.stdout.readline() == "ready\n"
        time.sleep(dice.uniform(0.0, 0.15))
        os.kill(saver.pid, signal.SIGKILL)
        saver.communicate()
        left_behind += any(folder.glob("*.tmp"))
        found, warnings = checkpoint.newest(folder)
        assert found is not None
        assert warnings == [], "a finished name is whole: the rename comes last"
        step = checkpoint.step_of(found)
        assert step is not None
        assert step >= last, "what was once the newest stays"
        if step > 0:
            content = {(found / n / "model.safetensors").read_bytes()[:4] for n in ("actor", "critic")}
            assert content == {step.to_bytes(4, "big")}, "no parts of two checkpoints"
        last = step
    assert last > 0
    assert left_behind > 0, "no kill fell into a save; the test shows nothing"
