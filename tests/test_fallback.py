"""An update that runs out of memory is done in smaller parts, and comes to the same."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from klimb.batch import Minibatch
from klimb.fallback import Fallback, halved, kept
from klimb.types import Batch
from klimb.update import update
from tests.test_update import REWARDS, recording
from tests.tiny_models import apart_roles, make_phase, make_recipe, split_of, tiny_model, train_batch
from tests.tiny_runs import build_tiny_model, rows, tiny_tree, write_config, write_inputs


def refused() -> Tensor:
    """More than any machine has: torch's own error for the CPU."""
    return torch.empty(2**50, dtype=torch.float32)


def test_halves_by_hand() -> None:
    micros = (torch.tensor([4, 2, 9, 1, 7]), torch.tensor([3]))
    assert [x.tolist() for x in halved(micros, 0)] == [[4, 2, 9, 1, 7], [3]]
    assert [x.tolist() for x in halved(micros, 1)] == [[4, 2, 9], [1, 7], [3]]
    assert [x.tolist() for x in halved(micros, 2)] == [[4, 2], [9], [1], [7], [3]]
    assert [x.tolist() for x in halved(micros, 9)] == [[4], [2], [9], [1], [7], [3]]
    assert halved((), 3) == ()


def test_work_is_done_again_in_halves_until_it_fits_and_then_stays_so() -> None:
    said: list[str] = []
    tried: list[list[int]] = []
    undone = 0

    def work(micros: Minibatch) -> int:
        tried.append([len(rows) for rows in micros])
        return int(refused().numel()) if max(tried[-1]) > 2 else len(micros)

    def undo() -> None:
        nonlocal undone
        undone += 1

    fallback, micros = Fallback(on=True, say=said.append), (torch.arange(8),)
    assert fallback.attempt(micros, work, undo) == 4
    assert tried == [[8], [4, 4], [2, 2, 2, 2]]
    assert (fallback.halvings, undone) == (2, 2)
    assert fallback.metrics() == {"update/micro_halvings": 2}
    assert len(said) == 1, "said once"
    assert "up to 8 rows" in said[0]
    assert fallback.attempt(micros, work, undo) == 4
    assert tried[3:] == [[2, 2, 2, 2]], "the next step begins with what fitted"


def test_it_ends_where_it_is_off_where_rows_are_single_and_for_other_errors() -> None:
    def never(micros: Minibatch) -> Tensor:
        return refused()

    def other(micros: Minibatch) -> None:
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="memory"):
        Fallback().attempt((torch.arange(8),), never, lambda: None)
    fallback = Fallback(on=True)
    with pytest.raises(RuntimeError, match="memory"):
        fallback.attempt((torch.arange(4),), never, lambda: None)
    assert fallback.halvings == 2, "four rows, two, one"
    with pytest.raises(RuntimeError, match="shapes"):
        Fallback(on=True).attempt((torch.arange(4),), other, lambda: None)
    assert Fallback().metrics() == {}


def test_an_object_is_put_back_to_what_it_was() -> None:
    fallback = Fallback(on=True)
    back = kept(fallback)
    fallback.halvings = 3
    back()
    assert fallback.halvings == 0


def refusing_the(number: int) -> Callable[..., None]:
    """A hook for which one call finds no memory."""
    calls = itertools.count(1)

    def hook(*_: Any) -> None:
        if next(calls) == number:
            refused()

    return hook


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_phase(tiny_model(), REWARDS)


def test_a_step_that_failed_half_way_gives_the_gradient_and_the_metrics_of_one_that_did_not(batch: Batch) -> None:
    """The second micro-batch of actor and critic is refused memory once, when the first has left its gradient."""
    recipe = make_recipe(adv_estimator="gae", kl_in_loss=True, entropy_coef=0.01, value_clip=0.2)
    found: list[tuple[Tensor, Tensor, dict[str, float]]] = []
    for fails in (False, True):
        roles = apart_roles()
        assert roles.critic is not None
        cut = split_of(batch, step=7, micro=4)
        train = train_batch(batch, cut, roles, recipe, 0.1)
        (actor, of_actor), (critic, of_critic) = recording(roles.actor), recording(roles.critic)
        if fails:
            for body in (roles.actor.base_model, roles.critic.body):
                body.register_forward_hook(refusing_the(2))
        fallback = Fallback(on=True)
        metrics = update(actor, critic, train, cut, recipe, 0.1, fallback=fallback)
        assert fallback.halvings == (2 if fails else 0), "one for each model"
        assert metrics.pop("update/micro_halvings") == fallback.halvings
        found.append((of_actor[0], of_critic[0], metrics))
    (actor, critic, metrics), (actor_again, critic_again, metrics_again) = found
    assert float((actor_again - actor).norm() / actor.norm()) < 2e-6
    assert float((critic_again - critic).norm() / critic.norm()) < 2e-6
    assert metrics_again.keys() == metrics.keys()
    for name, value in metrics.items():
        assert metrics_again[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


SHORT = """
    import resource, sys
    import klimb
    from klimb import loop
    from klimb.config.schema import RunConfig

    def size():
        return next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("VmSize:"))

    if __name__ == "__main__":
        whole, room = loop.update, int(sys.argv[2])

        def update(*args):
            resource.setrlimit(resource.RLIMIT_AS, (size() + room, resource.RLIM_INFINITY) if room else (-1, -1))
            try:
                return whole(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

        loop.update = update
        klimb.train(RunConfig.load(sys.argv[1]))
"""


def run_short(tmp_path: Path, name: str, room: int, **changes: Any) -> tuple[int, str, Path]:
    """A run whose updates may map `room` more bytes than the process has: exit code, output, folder."""
    write_inputs(tmp_path / "inputs", 64)
    model = tmp_path / "model"
    if not model.exists():
        build_tiny_model(model, hidden=256)
    tree = tiny_tree(
        model,
        tmp_path / "inputs",
        tmp_path / name,
        **{
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollouts_per_prompt": 4,
            "actor_rollout_ref.rollout_batch_size": 64,
            "actor_rollout_ref.max_tokens": 100,
            "actor_rollout_ref.use_dynamic_bsz": False,
            "training.micro_batch_size": 64,
            "training.gradient_accumulation_steps": 1,
            "training.total_episodes": 128,
            "training.save_freq": 1000,
            "training.lr": 1e-6,  # AdamW's first step takes the sign of every gradient, rounding included
            "training.keep_freed_memory": False,
            "data.eval_files": [],
            **changes,
        },
    )
    config = write_config(tmp_path / f"{name}.yaml", tree)
    (tmp_path / "short.py").write_text(textwrap.dedent(SHORT))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "short.py"), str(config), str(room)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, tmp_path / name / "run"


ROOM = 125 * 2**20


@pytest.mark.slow
def test_a_run_that_really_has_too_little_memory_goes_on_in_halves(tmp_path: Path) -> None:
    """The kernel refuses the process more address space than it has and ROOM."""
    code, out, _ = run_short(tmp_path, "ends", ROOM)
    assert code != 0
    assert "memory ran out in the phase 'update'" in out
    assert "training.micro_batch_fallback=true" in out, "the remedy is named"
    code, out, folder = run_short(tmp_path, "goes-on", ROOM, **{"training.micro_batch_fallback": True})
    assert code == 0, out[-3000:]
    assert " ".join(out.split()).count("are halved for the rest of this run") == 1
    code, _, plain = run_short(tmp_path, "plain", 0)
    assert code == 0
    got, want = rows(folder), rows(plain)
    assert [row["update/micro_halvings"] for row in got] == [got[0]["update/micro_halvings"]] * 2
    assert got[0]["update/micro_halvings"] >= 1
    assert "update/micro_halvings" not in want[0]
    for key in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/entropy", "kl/k3"):
        assert got[0][key] == pytest.approx(want[0][key], rel=1e-4, abs=1e-6), key
    # One answer of the second phase may fall the other way at a tie.
    assert got[1]["policy/grad_norm"] == pytest.approx(want[1]["policy/grad_norm"], rel=0.1)
    assert got[1]["policy/first_ratio_dev_max"] == 0.0, "the pass before the update is cut likewise"
