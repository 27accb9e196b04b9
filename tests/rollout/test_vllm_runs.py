"""Whole runs with the vllm engine: it is measured at every step, a sync that fails is found, and the recipe learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

import klimb
from klimb.config.paths import missing_model
from klimb.rollout.vllm import VLLMSampler
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed here (make test-vllm)"),
]
ROOT = Path(__file__).resolve().parents[2]
SOUND = 1e-3
"""Nats: more than the difference of any token's log-prob between sound engines in float32."""


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    write_inputs(tmp_path / "inputs")
    return build_tiny_model(tmp_path / "model", head_dim=32), tmp_path / "inputs"


RUN = {"actor_rollout_ref.rollout_provider": "vllm", "training.lr": 3e-3, "eval.every_episodes": 24}


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "cached"])
def test_every_step_of_a_run_measures_the_engine_and_finds_it_sound(
    parts: tuple[Path, Path], tmp_path: Path, explicit: bool
) -> None:
    config = tiny_config(*parts, tmp_path / "runs", **{**RUN, "algorithm.use_pf_ppo": explicit})
    folder = klimb.train(config).folder
    table = [row for row in rows(folder) if row["step"] > 0]
    assert len(table) == 6
    for row in table:
        assert row["mismatch/max_log_ratio"] < SOUND
        assert row["mismatch/probs_diff_max"] < SOUND
        assert row["mismatch/k3"] < 1e-7
    assert sum(row["policy/grad_norm"] for row in table) > 0
    assert "engine_mismatch" not in {finding.code for finding in klimb.diagnose(folder)}


class LeftBehind(VLLMSampler):
    """The fault that is hardest to see: the weights of the start go on sampling, under the newest version."""

    def load_weights(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        if version == 0:
            super().load_weights(named_tensors, version)
        self._version = version


def head_left_behind(model: torch.nn.Module) -> None:
    """What vLLM's reload alone leaves of a tied model on a CPU: all but the packed head is new."""


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klimb.build.VLLMSampler", LeftBehind)


def head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klimb.rollout.vllm._pack_head", head_left_behind)


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "cached"])
@pytest.mark.parametrize("fault", [whole, head])
def test_weights_that_did_not_land_are_measured_at_the_next_step_and_named(
    parts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    explicit: bool,
) -> None:
    fault(monkeypatch)
    changes = {**RUN, "training.lr": 2e-2, "algorithm.use_pf_ppo": explicit}
    folder = klimb.train(tiny_config(*parts, tmp_path / "runs", **changes)).folder
    first, second, *_ = (row["mismatch/max_log_ratio"] for row in rows(folder) if row["step"] > 0)
    assert first < SOUND
    assert second > 10 * SOUND, "one step after the first update"
    findings = {finding.code: finding for finding in klimb.diagnose(folder)}
    assert findings["engine_mismatch"].severity == "alarm"
    assert findings["engine_mismatch"].first <= 3


@pytest.mark.slow
@pytest.mark.skipif(
    missing_model("model", "playground:sft") is not None,
    reason="the playground is not prepared (klimb prepare playground)",
)
def test_the_arithmetic_recipe_learns(tmp_path: Path) -> None:
    overrides = ["actor_rollout_ref.rollout_provider=vllm", "training.total_episodes=1600", "eval.max_prompts=128"]
    recipe = klimb.RunConfig.load(ROOT / "recipes" / "arithmetic.yaml", [*overrides, f"run.dir={tmp_path}"])
    result = klimb.train(recipe)
    table = [row for row in rows(result.folder) if row["step"] > 0]
    assert max(row["mismatch/max_log_ratio"] for row in table) < SOUND
    assert result.after["eval/accuracy"] > result.before["eval/accuracy"] + 0.05
