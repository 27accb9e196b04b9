"""The worker pool with real processes, real hangs and real crashes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from reward_samples import make_sample

from klimb.errors import RewardError
from klimb.reward.base import Failure, RewardSettings
from klimb.reward.combine import score_samples
from klimb.reward.table import FunctionSpec, make_component
from klimb.reward.workers import WorkerPool

REWARD = """
import os
import sys
import time
from dataclasses import dataclass

import beside


@dataclass
class Odd(Exception):
    text: str


def reward(prompt, response, answer, scale=1.0):
    if response == "sleep":
        time.sleep(60)
    if response == "spin":
        while True:
            pass
    if response == "raise":
        raise ValueError("bad")
    if response == "odd":
        raise Odd("cannot be unpickled elsewhere")
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(4)
    if response == "none":
        return None
    if response == "nan":
        return float("nan")
    if response == "text":
        return "1.0"
    if response == "dict":
        return {"value": 0.25, "correct": True}
    if response == "bad dict":
        return {"reward": 0.25}
    if response == "torch":
        return float("torch" in sys.modules)
    if response == "echo":
        return {"value": float(len(prompt)), "correct": answer == "gold"}
    return beside.ONE * scale


def matches(prompt, response, answer):
    return response == answer


async def later(prompt, response, answer):
    return 1.0


def narrow(prompt, response):
    return 1.0
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "beside.py").write_text("ONE = 1.0\n")
    file = folder / "mine.py"
    file.write_text(dedent(REWARD))
    return file


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(workers=1, timeout_seconds=1.0) as pool:
        yield pool


def test_case_RF_02_hanging_reward(reward_file: Path, pool: WorkerPool) -> None:
    component = make_component(FunctionSpec(name=f"{reward_file}:reward"), pool)
    settings = RewardSettings(on_failure=0.0, max_failed_fraction=1.0)
    samples = [make_sample(text, row=i) for i, text in enumerate(["fine", "sleep", "raise", "fine"])]
    start = time.perf_counter()
    scored, report = score_samples(samples, [component], settings, None)
    assert time.perf_counter() - start < 10.0
    assert [s.total for s in scored] == [1.0, 0.0, 0.0, 1.0]
    assert report.counts == {"timeout": 1, "error": 1}
    assert report.metrics["reward/failed"] == 2
    assert report.messages == (
        "sample 1 (data row 1 of rows.jsonl): reward 'mine.reward': timeout: no answer within 1 s",
        "sample 2 (data row 2 of rows.jsonl): reward 'mine.reward': error: ValueError: bad",
    )
    after, report = score_samples([make_sample("fine")] * 3, [component], settings, None)
    assert [s.total for s in after] == [1.0, 1.0, 1.0]
    assert report.metrics["reward/failed"] == 0


def test_what_a_function_may_return_and_raise(reward_file: Path, pool: WorkerPool) -> None:
    component = make_component(FunctionSpec(name=f"{reward_file}:reward", args={"scale": 3.0}), pool)
    texts = ["fine", "none", "nan", "text", "dict", "bad dict", "odd", "exit", "die", "spin", "torch", "echo"]
    got = component.score([make_sample(text, answer="gold", prompt="four") for text in texts])
    by_text = dict(zip(texts, got, strict=True))
    assert by_text["fine"].value == 3.0
    assert by_text["none"] == by_text["none"].__class__()
    assert (by_text["dict"].value, by_text["dict"].correct) == (0.25, True)
    assert by_text["torch"].value == 0.0, "a worker must not load torch"
    assert (by_text["echo"].value, by_text["echo"].correct) == (4.0, True)
    kinds = {text: outcome.failure.kind for text, outcome in by_text.items() if outcome.failure}
    assert kinds == {
        "nan": "non_finite",
        "text": "error",
        "bad dict": "error",
        "odd": "error",
        "exit": "error",
        "die": "error",
        "spin": "timeout",
    }
    details = {text: outcome.failure.detail for text, outcome in by_text.items() if outcome.failure}
    assert "str '1.0'" in details["text"]
    assert "SystemExit: 3" in details["exit"]
    assert "exit code 4" in details["die"]
    assert "['reward']" in details["bad dict"]


def test_a_bool_is_a_verdict(reward_file: Path, pool: WorkerPool) -> None:
    component = make_component(FunctionSpec(name=f"{reward_file}:matches"), pool)
    got = component.score([make_sample("5", answer="5"), make_sample("6", answer="5")])
    assert [(o.value, o.correct) for o in got] == [(1.0, True), (0.0, False)]


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("rewrd", {}, "no function 'rewrd'. Did you mean 'reward'"),
        ("later", {}, "async"),
        ("narrow", {}, "unexpected keyword argument 'answer'"),
        ("reward", {"scal": 1}, "unexpected keyword argument 'scal'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_start(
    reward_file: Path, pool: WorkerPool, function: str, args: dict[str, int], message: str
) -> None:
    with pytest.raises(RewardError) as error:
        make_component(FunctionSpec(name=f"{reward_file}:{function}", args=args), pool)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(:\n", "line 1 is not Python"),
        ("x = 1 / 0\n", "ZeroDivisionError"),
        ("import sys\nsys.exit(1)\n", "SystemExit"),
    ],
)
def test_a_file_that_does_not_load_is_refused_at_start(
    tmp_path: Path, pool: WorkerPool, source: str, message: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(RewardError) as error:
        make_component(FunctionSpec(name=f"{file}:reward"), pool)
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_a_missing_file_is_refused_and_its_neighbours_named(reward_file: Path, pool: WorkerPool) -> None:
    with pytest.raises(RewardError, match=r"there is no file .*main\.py\. Beside it: beside\.py, mine\.py"):
        make_component(FunctionSpec(name=f"{reward_file.parent}/main.py:reward"), pool)


def test_a_batch_that_hangs_is_not_waited_for_row_by_row(reward_file: Path) -> None:
    with WorkerPool(workers=1, timeout_seconds=0.5, max_failed_fraction=0.1) as pool:
        component = make_component(FunctionSpec(name=f"{reward_file}:reward"), pool)
        start = time.perf_counter()
        settings = RewardSettings(max_failed_fraction=0.1)
        with pytest.raises(RewardError, match="20 of 20 episodes"):
            score_samples([make_sample("sleep")] * 20, [component], settings, None)
        # 20 limits of 0.5 s each would be 10 s, process starts not counted.
        assert time.perf_counter() - start < 8.0


@pytest.mark.parametrize("seconds_later", [0.0, 0.5], ids=["calls already sent", "noticed before"])
def test_processes_lost_while_idle_are_replaced(reward_file: Path, seconds_later: float) -> None:
    with WorkerPool(workers=1, timeout_seconds=5.0) as pool:
        component = make_component(FunctionSpec(name=f"{reward_file}:reward"), pool)
        (worker,) = pool.run(os.getpid, [()], num_rows=1)
        assert not isinstance(worker, Failure)
        os.kill(worker, signal.SIGKILL)
        time.sleep(seconds_later)
        assert [o.value for o in component.score([make_sample("fine")] * 3)] == [1.0, 1.0, 1.0]


def test_a_run_script_without_main_guard_gets_told_so(tmp_path: Path, reward_file: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from klimb.errors import RewardError\n"
        "from klimb.reward.table import FunctionSpec, make_component\n"
        "from klimb.reward.workers import WorkerPool\n"
        "try:\n"
        "    pool = WorkerPool(workers=1, timeout_seconds=5)\n"
        f"    make_component(FunctionSpec(name={str(reward_file) + ':reward'!r}), pool)\n"
        "except RewardError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert 'if __name__ == "__main__":' in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_spinning_worker_dies_with_a_killed_run(tmp_path: Path, reward_file: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import os\n"
        "if __name__ == '__main__':\n"
        "    from reward_samples import make_sample\n"
        "    from klimb.reward.table import FunctionSpec, make_component\n"
        "    from klimb.reward.workers import WorkerPool\n"
        "    pool = WorkerPool(workers=1, timeout_seconds=60)\n"
        f"    component = make_component(FunctionSpec(name={str(reward_file) + ':reward'!r}), pool)\n"
        "    print(pool.run(os.getpid, [()], num_rows=1)[0], flush=True)\n"
        "    component.score([make_sample('spin')])\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        time.sleep(0.5)
        run.kill()
    deadline = time.monotonic() + 5.0
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
