"""What waits in the host's memory: on a CPU nothing moves and the run says so; on a GPU it moves and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import klimb
from klimb.config.schema import RunConfig
from klimb.models.load import critic_from
from klimb.offload import HOST, at_work, park_states, states_at_work
from klimb.ranks import ALONE
from klimb.snapshot import Parts, State, fill, restore
from klimb.update import Trainable
from tests.tiny_models import adamw, byte_tokenizer, tiny_model, weights_of
from tests.tiny_runs import build_tiny_model, rows, tiny_config, write_inputs

OFF: dict[str, Any] = {"training.offload": {"params": True, "optimizer": True}}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train_once(module: nn.Module, trainable: Any) -> None:
    device = next(module.parameters()).device
    module(input_ids=torch.tensor([[5, 6, 7]], device=device)).logits.square().mean().backward()
    with states_at_work(trainable.optimizer, trainable.states_wait):
        trainable.optimizer.step()
    trainable.optimizer.zero_grad()


def test_contexts_without_a_place_or_a_module_do_nothing() -> None:
    model = tiny_model()
    pointers = [p.data_ptr() for p in model.parameters()]
    with at_work(model, None), at_work(None, HOST), at_work(model, HOST):
        pass
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_states_that_wait_give_the_same_steps() -> None:
    found: list[torch.Tensor] = []
    for waits in (False, True):
        model = tiny_model()
        trainable = adamw(model, lr=1e-2)
        trainable.states_wait = waits
        for _ in range(3):
            train_once(model, trainable)
        park_states(trainable.optimizer)
        found.append(weights_of(model))
    assert torch.equal(*found)
    assert not torch.equal(found[0], weights_of(tiny_model()))


@pytest.mark.parametrize(
    ("place", "waits", "home"), [("meta", False, "meta"), ("meta", True, "cpu"), (None, False, "cpu")]
)
def test_restored_states_are_where_the_steps_are_made(
    tmp_path: Path, place: str | None, waits: bool, home: str
) -> None:
    """A critic that waits for its update is on the host while a checkpoint is read. meta stands for a GPU."""
    trained = adamw(critic_from(tiny_model()), lr=1e-2)
    for parameter in trained.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained.optimizer.step()
    (tmp_path / "saved").mkdir()
    fill(tmp_path / "saved", parts_of(trained), State(step=1), {})
    waiting = adamw(critic_from(tiny_model()), lr=1e-2)
    waiting.place, waiting.states_wait = None if place is None else torch.device(place), waits
    restore(tmp_path / "saved", parts_of(waiting))
    states = [value for state in waiting.optimizer.state.values() for value in state.values()]
    assert len(states) == 3 * len(list(waiting.module.parameters()))
    assert {value.device.type for value in states} == {home}
    assert next(waiting.module.parameters()).device == HOST


def parts_of(critic: Trainable) -> Parts:
    return Parts(
        config=RunConfig.model_validate({"actor_rollout_ref": {"model_path": ""}}),
        tokenizer=byte_tokenizer(),
        actor=adamw(tiny_model(), lr=1e-2),
        critic=critic,
        stateful={},
        offsets={},
        ranks=ALONE,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, where things do move")
def test_on_a_cpu_the_run_says_that_nothing_moves_and_its_numbers_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path / "inputs")
    model = build_tiny_model(tmp_path / "model")
    short: dict[str, Any] = {"training.total_episodes": 16, "data.eval_files": []}
    offloaded = klimb.train(tiny_config(model, tmp_path / "inputs", tmp_path / "a", **short, **OFF))
    text = " ".join(capsys.readouterr().out.split())
    assert "training.offload: this machine has no GPU" in text
    plain = klimb.train(tiny_config(model, tmp_path / "inputs", tmp_path / "b", **short))
    assert "training.offload" not in capsys.readouterr().out
    assert rows(offloaded.folder) == rows(plain.folder)


@pytest.mark.gpu
@GPU
def test_on_a_gpu_models_and_states_move_and_come_back() -> None:
    place, model = torch.device("cuda"), tiny_model()
    trainable = adamw(model, lr=1e-2)
    trainable.states_wait = True
    with at_work(model, place):
        assert all(p.device.type == "cuda" for p in model.parameters())
        train_once(model, trainable)
        states = [value for state in trainable.optimizer.state.values() for value in state.values()]
        assert states
        assert all(t.device == HOST for t in states)
        train_once(model, trainable)
    assert all(p.device == HOST for p in model.parameters())


@pytest.mark.gpu
@GPU
def test_on_a_gpu_offload_changes_no_number_and_lowers_the_peak(tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs")
    model = build_tiny_model(tmp_path / "model", hidden=256)
    short: dict[str, Any] = {"training.total_episodes": 24, "data.eval_files": [], "training.dtype": "float32"}
    found = [
        rows(klimb.train(tiny_config(model, tmp_path / "inputs", tmp_path / name, **short, **changes)).folder, True)
        for name, changes in (("a", {}), ("b", OFF))
    ]
    for plain, offloaded in zip(*found, strict=True):
        assert offloaded["policy/grad_norm"] == pytest.approx(plain["policy/grad_norm"], rel=1e-4)
    assert found[1][-1]["memory/rollout_peak"] < found[0][-1]["memory/rollout_peak"]
