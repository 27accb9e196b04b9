"""The batch arithmetic."""

from __future__ import annotations

import pytest

from klimb.config.counts import Counts, count, due, table
from klimb.config.posture import resolve
from klimb.errors import ConfigError

from .conftest import MODEL, Load

ARTICLE = (
    "training.trainer=fsdp",
    "training.total_episodes=20000",
    "training.save_freq=2000",
    "actor_rollout_ref.rollout_batch_size=1024",
)


def counts(load: Load, *overrides: str, num_prompts: int | None = None) -> Counts:
    config = load(MODEL, *overrides).config
    return count(config, resolve(config), num_prompts)


def test_the_article(load: Load) -> None:
    c = counts(load, *ARTICLE)
    assert (c.episodes, c.phases, c.phase, c.last_phase) == (20_000, 20, 1024, 544)
    assert c.episodes == 19 * 1024 + 544
    assert (c.train_batch, c.steps_per_phase, c.optimizer_steps) == (32, 32, 19 * 32 + 17)
    assert c.optimizer_steps == 625
    assert c.checkpoints == 10
    assert c.batch_ratio == 32
    assert c.evals == 0


def cells(load: Load, *overrides: str) -> dict[str, tuple[str, str]]:
    config = load(MODEL, *overrides).config
    return {name: (number, how) for name, number, how in table(config, count(config, resolve(config)))}


def test_the_table_tells_the_article_on_how_many_ranks_its_ratio_is_4(load: Load) -> None:
    rows = cells(load, *ARTICLE)
    assert rows["rollout : train batch"] == ("32", "outside the usual 4 to 8; it is 4 on 8 ranks")
    assert rows["rollout phases"] == ("20", "20,000 / 1,024, the last has 544")
    assert rows["optimizer steps"][0] == "625"
    assert rows["checkpoints"][0] == "10"
    on_eight = cells(load, *ARTICLE, "training.num_processes=8")
    assert on_eight["rollout : train batch"] == ("4", "within the usual 4 to 8")
    assert on_eight["train batch"][0] == "256 episodes"


def test_more_epochs_and_groups(load: Load) -> None:
    c = counts(
        load,
        "actor_rollout_ref.rollout_batch_size=64",
        "actor_rollout_ref.rollouts_per_prompt=8",
        "algorithm.ppo_epochs=3",
        "training.total_episodes=160",
        "training.micro_batch_size=5",
        "training.gradient_accumulation_steps=4",
        "data.eval_files=[x]",
        "training.save_freq=100",
    )
    assert c.prompts_per_phase == 8
    assert (c.phases, c.last_phase) == (3, 32)
    assert c.steps_per_phase == 3 * 4  # ceil(64 / 20)
    assert c.optimizer_steps == 3 * (4 + 4 + 2)
    assert c.checkpoints == 2  # 128 crosses 100; 160 is the end
    assert c.evals == 3 + 1  # every 16 episodes: after each of the 3 phases, and before training


def test_a_run_shorter_than_a_phase(load: Load) -> None:
    c = counts(load, "training.total_episodes=10", "training.save_freq=100")
    assert (c.phases, c.phase, c.last_phase, c.checkpoints) == (1, 10, 10, 1)
    assert c.optimizer_steps == 1


@pytest.mark.parametrize(
    ("epochs", "prompts", "episodes"), [(2, 12, 96), (1, 5, 20), (1000, 1000, 20_000), (1, None, 20_000)]
)
def test_total_epochs_stops_where_it_comes_first(load: Load, epochs: int, prompts: int | None, episodes: int) -> None:
    group = "actor_rollout_ref.rollouts_per_prompt=4"
    c = counts(load, group, f"training.total_epochs={epochs}", num_prompts=prompts)
    assert c.episodes == episodes


def test_a_group_that_does_not_divide_the_run_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"training\.total_episodes 30 is no multiple .* 8"):
        counts(load, "actor_rollout_ref.rollouts_per_prompt=8", "training.total_episodes=30")


@pytest.mark.parametrize(
    ("before", "after", "every", "expected"),
    [
        (0, 3, 4, False),
        (0, 4, 4, True),
        (4, 7, 4, False),
        (3, 4, 4, True),
        (4, 8, 4, True),
        (0, 13, 4, True),
        (12, 12, 4, False),
    ],
)
def test_due_when_a_multiple_is_crossed(before: int, after: int, every: int, expected: bool) -> None:
    assert due(before, after, every) is expected


CR_02 = {
    "7 steps every 3": (28, 12, None, [3, 6, 7]),
    "7 steps every 7": (28, 28, None, [7]),
    "2 steps every 100": (8, 400, None, [2]),
    "2 epochs of 24": (40, 16, 12, [4, 6]),
}


@pytest.mark.parametrize(("total", "save", "prompts", "steps"), CR_02.values(), ids=CR_02.keys())
def test_case_CR_02_the_last_state_is_saved_once(
    load: Load, total: int, save: int, prompts: int | None, steps: list[int]
) -> None:
    """Four episodes a phase; the fourth has 24 episodes of data over two epochs."""
    c = counts(
        load,
        "actor_rollout_ref.rollout_batch_size=4",
        f"training.total_episodes={total}",
        f"training.save_freq={save}",
        "training.total_epochs=2" if prompts else "training.total_epochs=null",
        num_prompts=prompts,
    )
    assert c.phases == steps[-1]
    assert c.checkpoints == len(steps)
    ends = [min(4 * n, c.episodes) for n in range(c.phases + 1)]
    saved = [n for n in range(1, c.phases + 1) if due(ends[n - 1], ends[n], save) or ends[n] == c.episodes]
    assert saved == steps
