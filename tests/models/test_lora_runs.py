"""Whole runs that train an adapter: they learn, stop and go on to the last bit, and leave folders others can open."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import klimb
from klimb import checkpoint
from klimb.cli.plan import show_plan
from klimb.config.load import load_config
from klimb.errors import CheckpointError
from klimb.launch import RunResult
from tests.models.test_adapter import save_adapter
from tests.tiny_runs import build_tiny_model, rows, tiny_config, tiny_tree, write_config, write_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
LORA: dict[str, Any] = {"actor_rollout_ref.lora": {"rank": 4, "alpha": 8}, "training.lr": 1e-2}
KLIMB = Path(sys.executable).parent / "klimb"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    write_inputs(folder / "inputs")
    return build_tiny_model(folder / "model"), folder / "inputs"


def run(parts: tuple[Path, Path], place: Path, **changes: Any) -> RunResult:
    return klimb.train(tiny_config(*parts, place / "runs", **{**LORA, **changes}))


def last(folder: Path) -> Path:
    return checkpoint.listed(folder / "checkpoints")[-1]


def weights(folder: Path, name: str = "actor/model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(last(folder) / name)


def same_files(one: Path, other: Path, *names: str) -> bool:
    return all((last(one) / name).read_bytes() == (last(other) / name).read_bytes() for name in names)


ADAPTER = ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "actor/model.safetensors")
GRPO = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollouts_per_prompt": 4}


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "cached"])
@pytest.mark.parametrize("estimator", [{}, GRPO], ids=["ppo", "grpo"])
def test_a_run_starts_at_its_reference_and_moves_only_the_adapter(
    parts: tuple[Path, Path], tmp_path: Path, explicit: bool, estimator: dict[str, Any]
) -> None:
    result = run(parts, tmp_path, **estimator, **{"algorithm.use_pf_ppo": explicit, "data.eval_files": []})
    log, base, merged = rows(result.folder), load_file(parts[0] / "model.safetensors"), weights(result.folder)
    if explicit:
        assert log[0]["kl/k3"] == 0.0
        assert all(row["policy/first_ratio_dev_max"] == 0.0 for row in log)
        assert all(row["mismatch/k3"] < 1e-9 for row in log)
    else:
        assert abs(log[0]["kl/k3"]) < 1e-9, "the sampler's log-probs are merged weights': equal but for rounding"
        assert all(row["policy/first_ratio_dev_max"] < 1e-3 for row in log)
    assert log[-1]["kl/k3"] > 1e-5
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if "_proj" in name}
    assert (
        "critic/model.safetensors" in {str(p.relative_to(last(result.folder))) for p in last(result.folder).rglob("*")}
    ) == (estimator == {})


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [{}, GRPO], ids=["ppo", "grpo"])
def test_a_short_run_learns(parts: tuple[Path, Path], tmp_path: Path, estimator: dict[str, Any]) -> None:
    changes = {"training.total_episodes": 640, "algorithm.kl_ctrl.init_kl_coef": 0.001, "data.eval_files": []}
    rewards = [row["reward/mean"] for row in rows(run(parts, tmp_path, **estimator, **changes).folder)]
    assert len(rewards) == 80
    assert sum(rewards[-8:]) > sum(rewards[:8]) + 8 * 0.2, rewards


@pytest.mark.slow
def test_stopping_and_resuming_changes_nothing(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """Resumed after step 3 from the adapter, not from the merged weights, whose bits are others."""
    adapter = save_adapter(parts[0], tmp_path / "trained")
    cases: dict[str, dict[str, Any]] = {"plain": {}, "above": {"actor_rollout_ref.adapter_path": str(adapter)}}
    for name, changes in cases.items():
        changes["training.keep_checkpoints"] = 6
        whole = run(parts, tmp_path / name, **changes, **{"run.name": "whole"})
        halves = run(parts, tmp_path / name, **changes, **{"run.name": "halves"}).folder
        for path in checkpoint.listed(halves / "checkpoints"):
            if (checkpoint.step_of(path) or 0) > 3:
                (path / "manifest.json").unlink()
        run(parts, tmp_path / name, **changes, **{"run.name": "halves"})
        assert same_files(halves, whole.folder, *ADAPTER, "critic/model.safetensors", "optimizer/model.safetensors")
        assert rows(halves) == rows(whole.folder)
        assert (halves / "samples.jsonl").read_bytes() == (whole.folder / "samples.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_again_and_again_ends_bit_identical(parts: tuple[Path, Path], tmp_path: Path) -> None:
    changes = {**LORA, **GRPO, "training.total_episodes": 64, "eval.every_episodes": 32}
    configs = [
        write_config(tmp_path / f"{name}.yaml", tiny_tree(*parts, tmp_path / name, **changes))
        for name in ("whole", "killed")
    ]
    environment, log = os.environ | {"OMP_NUM_THREADS": "1"}, tmp_path / "output.txt"

    def start(config: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen([KLIMB, "train", config], env=environment, stdout=out, stderr=out)

    assert start(configs[0]).wait(200) == 0, log.read_text()[-2000:]
    rng, kills, folder = random.Random(1), 0, tmp_path / "killed" / "run"
    for number in range(4):
        process = start(configs[1])
        before, end = len(checkpoint.listed(folder / "checkpoints")), time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            found = checkpoint.listed(folder / "checkpoints")
            if found and (number == 0 or len(found) != before or any((folder / "checkpoints").glob("*.tmp"))):
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.3))
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills >= 2
    assert start(configs[1]).wait(200) == 0, log.read_text()[-2000:]
    assert same_files(folder, tmp_path / "whole" / "run", *ADAPTER, "optimizer/model.safetensors")
    assert rows(folder) == rows(tmp_path / "whole" / "run")


def test_a_checkpoint_holds_a_plain_model_and_a_peft_folder_that_agree(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = run(parts, tmp_path, **{"training.total_episodes": 16, "data.eval_files": []}).folder
    plain = AutoModelForCausalLM.from_pretrained(last(folder) / "actor").eval()
    base = AutoModelForCausalLM.from_pretrained(parts[0])
    tuned = PeftModel.from_pretrained(base, str(last(folder) / "adapter")).eval()
    ids = torch.tensor([[1, 9, 30, 7, 5]])
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, tuned(ids).logits, atol=1e-5)
        with tuned.disable_adapter():
            assert not torch.allclose(plain(ids).logits, tuned(ids).logits, atol=1e-3)
    record = json.loads((last(folder) / "adapter" / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str(parts[0])
    assert (record["r"], record["lora_alpha"], record["lora_dropout"], record["inference_mode"]) == (4, 8, 0.0, True)
    optimizer = load_file(last(folder) / "optimizer" / "model.safetensors")
    moments = sum(t.numel() for name, t in optimizer.items() if name.startswith("actor.") and name.endswith(".exp_avg"))
    assert moments == sum(t.numel() for t in weights(folder, "adapter/adapter_model.safetensors").values())
    exported = tmp_path / "exported"
    klimb_export = subprocess.run(
        [KLIMB, "export", folder, "--to", exported], capture_output=True, text=True, check=False, timeout=120
    )
    assert klimb_export.returncode == 0, klimb_export.stderr
    assert (exported / "model.safetensors").read_bytes() == (last(folder) / "actor/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ("actor_rollout_ref.lora.rank=8", "actor_rollout_ref.lora.rank: 4 there, 8 now"),
        ("actor_rollout_ref.lora.alpha=4", "actor_rollout_ref.lora.alpha: 8 there, 4 now"),
        ("actor_rollout_ref.lora.target_modules=[q_proj]", "actor_rollout_ref.lora.target_modules: 'all-linear' there"),
        ("actor_rollout_ref.lora=null", "actor_rollout_ref.lora.rank: 4 there, None now"),
    ],
)
def test_another_lora_is_another_kind_of_run(parts: tuple[Path, Path], tmp_path: Path, other: str, key: str) -> None:
    short = {"training.total_episodes": 8, "data.eval_files": []}
    run(parts, tmp_path, **short)
    config = klimb.RunConfig.load(tmp_path / "runs.yaml", [other, "training.total_episodes=16"])
    with pytest.raises(CheckpointError) as error:
        klimb.train(config)
    assert f"  {key}" in str(error.value)


def test_a_base_that_was_exchanged_is_not_gone_on_from(parts: tuple[Path, Path], tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    changes = {"data.eval_files": [], "training.total_episodes": 8}
    run((model, parts[1]), tmp_path, **changes)
    build_tiny_model(model, seed=1)
    with pytest.raises(CheckpointError, match="holds other weights than when the run began"):
        run((model, parts[1]), tmp_path, **{**changes, "training.total_episodes": 16})


def test_on_a_trained_adapter_the_reference_has_that_one_and_not_the_new(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    trained = save_adapter(parts[0], tmp_path / "trained")
    changes = {"actor_rollout_ref.adapter_path": str(trained), "data.eval_files": [], "training.total_episodes": 16}
    folder = run(parts, tmp_path, **changes).folder
    first, second = rows(folder)
    assert first["kl/k3"] == 0.0
    assert second["kl/k3"] > 0.0
    plain = rows(run(parts, tmp_path, **{**changes, "actor_rollout_ref.adapter_path": None, "run.name": "p"}).folder)
    assert plain[0]["policy/entropy"] != pytest.approx(first["policy/entropy"], rel=1e-3)
    record = json.loads((last(folder) / "adapter" / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] is None, "no folder has the merged base"


def test_a_reference_of_its_own_is_loaded_beside_the_policy(parts: tuple[Path, Path], tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", seed=4)
    changes = {"actor_rollout_ref.ref_model_path": str(other), "training.total_episodes": 8, "data.eval_files": []}
    with_lora = rows(run(parts, tmp_path, **changes).folder)[0]
    without = rows(run(parts, tmp_path, **changes, **{"actor_rollout_ref.lora": None, "run.name": "full"}).folder)[0]
    assert with_lora["kl/k3"] == without["kl/k3"] > 0.01


@pytest.mark.slow
def test_the_guard_takes_an_adapter_back_too(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """An lr that breaks the run at once, and a rollback; a run that resumes behind it ends the same."""
    changes: dict[str, Any] = {
        "training.lr": 0.3,
        "algorithm.kl_ctrl.target_kl": 0.1,
        "training.total_episodes": 112,
        "training.save_freq": 24,
        "diagnostics.on_alarm": "rollback",
        "diagnostics.healthy_every_phases": 2,
    }
    whole = run(parts, tmp_path, **changes)
    assert whole.interventions
    assert whole.interventions[0].back_to < whole.interventions[0].step
    halves = run(parts, tmp_path, **changes, **{"run.name": "halves"}).folder
    (last(halves) / "manifest.json").unlink()
    run(parts, tmp_path, **changes, **{"run.name": "halves"})
    assert same_files(halves, whole.folder, *ADAPTER)


def test_plan_shows_the_adapter_and_where_the_reference_is(
    parts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tiny_tree(*parts, tmp_path / "runs", **LORA)
    show_plan(load_config(write_config(tmp_path / "c.yaml", tree)), elsewhere=False)
    out = capsys.readouterr().out
    assert "{rank: 4, alpha: 8, target_modules: all-linear}" in out
    assert "trained: a LoRA adapter of rank 4; all other weights stay" in out
    assert "reference (the policy with its adapter off, no gradient)" in out
