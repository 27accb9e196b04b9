"""The installed `klimb` command, in processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from klimb.config.load import known_keys
from klimb.version import VERSION

ROOT = Path(__file__).parents[2]
KLIMB = Path(sys.executable).parent / "klimb"
COMMANDS = ["train", "plan", "compare", "report", "eval", "prepare", "export"]
ARTICLE = ROOT / "recipes" / "article-7b.yaml"
CONFIG = """\
actor_rollout_ref:
  model_path: /nowhere/sft
  rollout_batch_size: 64
algorithm: {use_pf_ppo: false}
reward_model: {functions: [{name: exact_answer, weight: 2}]}
data: {train_files: ["task:arithmetic"]}
training: {total_episodes: 640}
"""


def klimb(*words: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([KLIMB, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def refused(*words: str | Path, **environment: str) -> str:
    """The one message of a user's mistake."""
    result = klimb(*words, **environment)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(CONFIG)
    return path


def test_help_names_every_command() -> None:
    result = klimb("--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", result.stdout, re.MULTILINE)
    assert klimb("--version").stdout == f"klimb, version {VERSION}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str) -> None:
    result = klimb(command, "--help")
    assert result.returncode == 0
    assert re.search(rf"Example:\n +klimb {command} ", result.stdout)


MISTAKES: dict[str, tuple[tuple[str | Path, ...], tuple[str, ...]]] = {
    "no command": ((), ("Usage: klimb",)),
    "unknown command": (("trian",), ("trian",)),
    "no config": (("plan",), ("Missing argument",)),
    "unknown recipe": (("plan", "recipes/smolm2-arithmetic.yaml"), ("did you mean recipes/smollm2-arithmetic.yaml?",)),
    "unknown folder": (("train", "nowhere/a.yaml"), ("nowhere/a.yaml: no such config file",)),
    "a folder for a file": (("plan", "recipes"), ("recipes: cannot be read",)),
    "export of nothing": (("export", "nowhere", "--to", "x"), ("nowhere: no checkpoint there",)),
    "export without a target": (("export", "nowhere"), ("--to",)),
    "export over a folder": (("export", "nowhere", "--to", "src"), ("--to src: it exists",)),
    "export of a wrong dtype": (("export", "nowhere", "--to", "x", "--dtype", "int8"), ("int8", "bfloat16")),
    "eval of a foreign folder": (("eval", "src"), ("src: no config.yaml there",)),
    "eval of nothing": (("eval", "nowhere.yaml"), ("nowhere.yaml: no such config file",)),
    "report of nothing": (("report", "nowhere"), ("nowhere: no such run folder",)),
    "report of a foreign folder": (("report", "src"), ("src: not a run folder: no config.yaml",)),
    "report into another kind of file": (("report", "src", "--out", "a.pdf"), ("--out a.pdf: must end in .html",)),
    "report served and written": (("report", "src", "--serve", "--out", "a.html"), ("--out and --serve",)),
    "report on a wrong port": (("report", "src", "--serve", "--port", "70000"), ("--port",)),
    "plan of GPUs without a size": (("plan", ARTICLE, "--elsewhere", "--gpu-memory", "nan"), ("--gpu-memory", "nan")),
    "plan at no end of a rate": (("plan", ARTICLE, "--elsewhere", "--rate", "inf"), ("--rate", "inf")),
    "a path for a name": (("train", ARTICLE, "run.name=../x"), ("run.name is '../x'", "run.dir has paths")),
    "a checkpoint that is not there": (
        ("train", "recipes/quickstart.yaml", "training.resume=nosuch"),
        ("training.resume=nosuch: ", "allowed: auto"),
    ),
    "a model that klimb does not prepare": (
        ("plan", "recipes/quickstart.yaml", "actor_rollout_ref.model_path=playground:nosuch"),
        ("actor_rollout_ref.model_path: 'playground:nosuch': no prepared model", "playground:sft"),
    ),
    "a task that does not exist": (
        ("plan", ARTICLE, "--elsewhere", "data.eval_files=[task:arithmetik]"),
        ("data.eval_files: 'task:arithmetik' is no task. Did you mean task:arithmetic?",),
    ),
    "eval of no model": (
        ("eval", "recipes/quickstart.yaml", "--model", "nosuch"),
        ("--model: no such folder: nosuch",),
    ),
    "sizes of nothing": (
        ("plan", ARTICLE, "--elsewhere", "--assume-model", "docs"),
        ("--assume-model 'docs': docs/config.json: cannot be read", "allowed too: 1.5b, 7b, 70b"),
    ),
    "engines of four for six ranks": (
        ("plan", ARTICLE, "--elsewhere", "--gpus", "6", "cluster.kind=ray", "actor_rollout_ref.vllm.tensor_parallel=4"),
        ("tensor_parallel is 4, but 6 ranks", "multiple of 4"),
    ),
    "answers into a file": (
        ("eval", "recipes/quickstart.yaml", "--samples", "README.md/x.jsonl"),
        ("--samples README.md/x.jsonl: cannot be written (Not a directory)",),
    ),
    "arms in a file": (
        ("compare", "recipes/quickstart.yaml", "--vary", "training.lr=1e-4,2e-4", "run.dir=README.md"),
        ("run.dir: README.md/compare-quickstart", "cannot be made (Not a directory)"),
    ),
    "prepare of nothing": (("prepare", "playgrond"), ("playground", "smollm2")),
}


@pytest.mark.parametrize(("words", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_exits_2_with_a_message(words: tuple[str | Path, ...], expected: tuple[str, ...]) -> None:
    message = refused(*words)
    for text in expected:
        assert text in message


def test_plan_refuses_paths_that_are_not_there_and_lists_them_elsewhere(recipe: Path) -> None:
    message = refused("plan", recipe)
    assert "klimb: actor_rollout_ref.model_path: no such folder: /nowhere/sft" in message
    assert "--elsewhere" in message
    result = klimb("plan", recipe, "--elsewhere")
    assert result.returncode == 0
    assert "not on this machine: actor_rollout_ref.model_path: no such folder: /nowhere/sft" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("columns", ["60", "200"])
def test_plan_prints_every_key_with_its_origin(recipe: Path, columns: str) -> None:
    override = "training.seed=5"
    output = klimb("plan", recipe, override, "--elsewhere", COLUMNS=columns).stdout
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in output.splitlines() if "." in line.split(" ")[0]}
    leaves = [key for key, _ in known_keys() if not any(k.startswith(key + ".") for k, _ in known_keys())]
    assert [key for key in leaves if key not in rows] == []
    words = {key: " ".join(rows[key].split()) for key in leaves}
    assert words["actor_rollout_ref.rollout_batch_size"] == f"64 {recipe}:3"
    assert words["training.seed"] == f"5 override {override}"
    assert words["algorithm.lam"] == "0.9 auto"
    assert words["training.lr"] == "5e-07 auto"
    assert words["algorithm.kl_estimator"] == "k1 (reward) auto"
    assert words["reward_model.clip"] == "[-5, 5] auto"
    assert words["reward_model.functions"] == f"[exact_answer x 2] {recipe}:5"
    assert words["data.shuffle"] == "true default"
    assert words["logging.wandb"] == "null default"
    for text in (
        "rollout phases",
        "optimizer steps",
        "checkpoints",
        "cached (use_pf_ppo=false)",
        "A-FIRST-RUN",
        "verl",
    ):
        assert text in output


def test_plan_says_what_the_controller_can_reach(recipe: Path) -> None:
    output = klimb("plan", recipe, "algorithm.use_pf_ppo=true", "--elsewhere").stdout
    assert re.search(r"KL coefficient +0\.05 +at most x1\.01 in 10 phases, within 0\.001 to 5", output)
    assert re.search(r"target KL +0\.02 +nats per token; 41 per answer of max_tokens", output)


def test_what_ranks_do_not_do_yet_plans_but_does_not_train(recipe: Path) -> None:
    fsdp = "training.trainer=fsdp"
    later = (
        "actor_rollout_ref.rollout_provider=vllm",
        "training.offload.params=true",
        "training.micro_batch_fallback=true",
    )
    output = klimb("plan", recipe, fsdp, *later, "--elsewhere").stdout
    assert "not in this version: actor_rollout_ref.rollout_provider=vllm beside several ranks" in output
    assert "not in this version: training.offload beside several ranks" in output
    assert "not in this version: training.micro_batch_fallback=true beside several ranks" in output
    for override in ((fsdp,), later):
        assert "not in this version" not in klimb("plan", recipe, *override, "--elsewhere").stdout
    for override in later:
        assert "fsdp" in refused("train", recipe, fsdp, override)


def test_a_wrong_config_is_refused_by_every_command_that_reads_one(recipe: Path) -> None:
    for command in ("train", "plan", "eval"):
        assert "did you mean 'training.lr'?" in refused(command, recipe, "training.lrr=1")
    assert "goes with a run folder" in refused("eval", recipe, "--checkpoint", "3")


def test_hostile_text_in_a_message_reaches_the_terminal_as_text(recipe: Path) -> None:
    message = refused("plan", recipe, "training.trainer=\x85\u202e")
    assert "\x85" not in message
    assert "\u202e" not in message


def test_a_reader_that_goes_away_gets_no_traceback(recipe: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [KLIMB, "plan", recipe, "--elsewhere"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(timeout=60)


def test_an_export_of_damaged_and_odd_checkpoints_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-000002").mkdir(parents=True)
    run = tmp_path / "run"
    assert "every checkpoint is damaged" in refused("export", run, "--to", tmp_path / "x")
    assert "incomplete or damaged" in refused("export", run, "--to", tmp_path / "x", "--checkpoint", "2")
    assert "step-000003: no such checkpoint" in refused("export", run, "--to", tmp_path / "x", "--checkpoint", "3")
    for odd in ("latest", "-1", "2.0", "\u00b2"):
        assert "allowed: last, best, or a step among 2" in refused(
            "export", run, "--to", tmp_path / "x", f"--checkpoint={odd}"
        )
    assert not (tmp_path / "x").exists()


def test_starting_up_imports_nothing_heavy(recipe: Path) -> None:
    code = (
        "import sys\n"
        "from klimb.cli import main\n"
        f"sys.argv = ['klimb', 'plan', {str(recipe)!r}, '--elsewhere']\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pandas', 'safetensors', 'tensorboard'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_a_wrong_config_is_refused_before_torch_is_there(recipe: Path) -> None:
    code = (
        "import sys\n"
        "from klimb.cli import main\n"
        f"sys.argv = ['klimb', 'train', {str(recipe)!r}, 'training.lrr=1']\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 2, stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
