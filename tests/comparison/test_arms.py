"""Arms differ in what is varied and in nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from klimb.comparison.arms import Arm, arms_between, arms_of, check_arms
from klimb.comparison.runs import comparison_folder, plan_runs, write_config
from klimb.config.guard import flat
from klimb.config.load import load_config, parse_vary
from klimb.config.schema import RunConfig, VaryConfig
from klimb.errors import ConfigError

LR = "training.lr=1e-4"
POSTURE = VaryConfig(key="algorithm.use_pf_ppo", values=(True, False))
CONFIG = """\
actor_rollout_ref: {model_path: /nowhere/sft, rollout_batch_size: 64}
algorithm: {adv_estimator: gae}
reward_model: {functions: [{name: task}]}
data: {train_files: ["task:arithmetic"]}
training: {total_episodes: 640}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(CONFIG)
    return path


def config(recipe: Path, *overrides: str) -> RunConfig:
    return load_config(recipe, overrides).config


def test_the_posture_brings_its_own_choices_and_one_learning_rate(recipe: Path) -> None:
    explicit, cached = arms_of(recipe, (), [POSTURE], None, False)
    assert (explicit.label, cached.label) == ("use_pf_ppo=true", "use_pf_ppo=false")
    first, second = flat(explicit.config), flat(cached.config)
    assert {key for key in first if first[key] != second[key]} == {
        "algorithm.use_pf_ppo",
        "algorithm.use_kl_in_reward",
        "algorithm.use_kl_loss",
        "algorithm.kl_estimator",
        "algorithm.kl_ctrl.type",
        "algorithm.kl_ctrl.init_kl_coef",
        "algorithm.lam",
        "reward_model.clip",
    }
    assert first["training.lr"] == second["training.lr"] == 1e-6


def test_with_advice_halves_the_cached_arms_rate(recipe: Path) -> None:
    explicit, cached = arms_of(recipe, ("training.lr=1e-4",), [POSTURE], None, True)
    assert (explicit.config.training.lr, cached.config.training.lr) == (1e-4, 5e-5)
    lam = VaryConfig(key="algorithm.lam", values=(0.9, 0.95))
    lr = VaryConfig(key="training.lr", values=(1e-4, 1e-5))
    for vary in ([lam], [POSTURE, lr]):
        with pytest.raises(ConfigError, match="and not training"):
            arms_of(recipe, (), vary, None, True)


def test_two_keys_make_every_combination(recipe: Path) -> None:
    place = VaryConfig(key="algorithm.use_kl_in_reward", values=(False, True))
    arms = arms_of(recipe, (), [POSTURE, place], None, False)
    assert [tuple(arm.values.values()) for arm in arms] == [(True, False), (True, True), (False, False), (False, True)]
    assert len({arm.slug for arm in arms}) == 4


def test_steps_set_the_length_in_phases(recipe: Path) -> None:
    arms = arms_of(recipe, (), [POSTURE], 3, False)
    assert {arm.config.training.total_episodes for arm in arms} == {3 * 64}
    sizes = VaryConfig(key="actor_rollout_ref.rollout_batch_size", values=(32, 64))
    assert [arm.config.training.total_episodes for arm in arms_of(recipe, (), [sizes], 3, False)] == [96, 192]
    length = VaryConfig(key="training.total_episodes", values=(64, 128))
    with pytest.raises(ConfigError, match="--steps"):
        arms_of(recipe, (), [length], 3, False)


def test_what_goes_along_a_value_is_set_in_its_arm_alone(recipe: Path) -> None:
    coef = "algorithm.kl_ctrl.init_kl_coef"
    vary = VaryConfig(key="algorithm.use_pf_ppo", values=(True, False), along=({coef: 1.0}, {coef: 0.01}))
    explicit, cached = arms_of(recipe, (), [vary], None, False)
    assert (flat(explicit.config)[coef], flat(cached.config)[coef]) == (1.0, 0.01)


@pytest.mark.parametrize("key", ["training.lr", "training.seed", "actor_rollout_ref.temperature"])
def test_nothing_else_may_go_along(recipe: Path, key: str) -> None:
    vary = VaryConfig(key="algorithm.use_pf_ppo", values=(True, False), along=({key: 1}, {}))
    with pytest.raises(ConfigError, match=f"{key} cannot go along"):
        arms_of(recipe, (), [vary], None, False)
    plain = VaryConfig(key="training.weight_decay", values=(0.0, 0.1), along=({"algorithm.lam": 0.9}, {}))
    with pytest.raises(ConfigError, match=r"nothing goes with training\.weight_decay"):
        arms_of(recipe, (), [plain], None, False)


@pytest.mark.parametrize("key", ["training.seed", "run.name", "logging.wandb", "training.resume"])
def test_a_key_that_makes_no_other_run_cannot_be_varied(recipe: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        arms_of(recipe, (), [VaryConfig(key=key, values=(0, 7))], None, False)


def test_arms_that_are_the_same_are_refused(recipe: Path) -> None:
    for key, values in (("algorithm.gamma", (1, 1.0)), ("algorithm.use_kl_loss", ("auto", True))):
        with pytest.raises(ConfigError, match="are the same config"):
            arms_of(recipe, (), [VaryConfig(key=key, values=values)], None, False)
    with pytest.raises(ConfigError, match="varied twice"):
        arms_of(recipe, (), [POSTURE, POSTURE], None, False)


def test_a_section_cannot_be_varied(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="is a section"):
        arms_of(recipe, (), [VaryConfig(key="algorithm.kl_ctrl", values=({}, {"horizon": 9.0}))], None, False)


def test_a_varied_key_cannot_go_along_with_another(recipe: Path) -> None:
    place = "algorithm.use_kl_in_reward"
    posture = VaryConfig(key="algorithm.use_pf_ppo", values=(True, False), along=({place: True}, {}))
    with pytest.raises(ConfigError, match="cannot go along"):
        arms_of(recipe, (), [posture, VaryConfig(key=place, values=(False, True))], None, False)


def test_names_and_folders_are_told_apart(recipe: Path) -> None:
    def made(*vary: VaryConfig) -> list[Arm]:
        return arms_of(recipe, (), vary, None, False)

    paths = made(VaryConfig(key="actor_rollout_ref.model_path", values=("/tmp/a/b", "/tmp/a_b", "/tmp/" + "x" * 300)))
    assert len({arm.slug for arm in paths}) == 3
    assert all(len(arm.slug) < 100 for arm in paths)
    rates = [VaryConfig(key=key, values=(1e-3, 1e-4)) for key in ("training.lr", "critic.lr")]
    assert made(*rates)[0].label == "training.lr=0.001, critic.lr=0.001"


def test_arms_that_differ_elsewhere_are_refused_with_the_keys(recipe: Path) -> None:
    arms = {
        "a": config(recipe),
        "b": config(recipe, "algorithm.use_pf_ppo=false", "training.lr=1e-3", "critic.lr=1e-2"),
    }
    with pytest.raises(ConfigError, match=r"(?s)critic\.lr: 1e-05 \(a\), 0\.01 \(b\).*training\.lr"):
        check_arms(arms, ["algorithm.use_pf_ppo"], set())


def test_runs_find_the_key_they_differ_in_and_seeds_are_one_arm(recipe: Path) -> None:
    runs = {
        "t0": config(recipe, "training.lr=1e-4"),
        "t1": config(recipe, "training.lr=1e-4", "training.seed=1"),
        "f0": config(recipe, "training.lr=1e-4", "algorithm.use_pf_ppo=false"),
    }
    arms = arms_between(runs, False)
    assert {name: arm.label for name, arm in arms.items()} == {
        "t0": "use_pf_ppo=true",
        "t1": "use_pf_ppo=true",
        "f0": "use_pf_ppo=false",
    }


def test_runs_of_a_two_by_two_are_told_apart_by_both_keys(recipe: Path) -> None:
    def run(old: str, place: str) -> RunConfig:
        return config(recipe, "training.lr=1e-4", f"algorithm.use_pf_ppo={old}", f"algorithm.use_kl_in_reward={place}")

    runs = {f"{old}-{place}": run(old, place) for old in ("true", "false") for place in ("true", "false")}
    assert len({arm.label for arm in arms_between(runs, False).values()}) == 4


def test_runs_that_differ_in_two_keys_or_in_none_are_refused(recipe: Path) -> None:
    same = {"a": config(recipe), "b": config(recipe, "training.seed=1")}
    with pytest.raises(ConfigError, match="nothing to compare"):
        arms_between(same, False)
    two = {"a": config(recipe), "b": config(recipe, "critic.lr=1e-3", "training.weight_decay=0.1")}
    with pytest.raises(ConfigError, match=r"(?s)critic\.lr.*training\.weight_decay"):
        arms_between(two, False)


def test_runs_of_two_configs_are_not_two_seeds_of_one_arm(recipe: Path) -> None:
    def run(old: str, lam: str, seed: int) -> RunConfig:
        return config(recipe, f"algorithm.use_pf_ppo={old}", f"algorithm.lam={lam}", f"training.seed={seed}", LR)

    runs = {"t0": run("true", "0.9", 0), "f0": run("false", "0.9", 0), "f1": run("false", "0.5", 1)}
    with pytest.raises(ConfigError, match=r"algorithm\.lam"):
        arms_between(runs, False)


def test_what_a_key_does_not_imply_is_refused(recipe: Path) -> None:
    fixed = config(recipe, "algorithm.kl_ctrl.type=fixed")
    other = config(recipe, "algorithm.kl_ctrl.type=adaptive", "algorithm.lam=0.5")
    with pytest.raises(ConfigError, match=r"and also in:\n  algorithm\.lam"):
        arms_between({"a": fixed, "b": other}, False)


@pytest.mark.parametrize("text", ["algorithm.lam", "algorithm.lam=", "algorithm.lam=0.9", "lam 0.9,1=2"])
def test_vary_needs_a_key_and_two_values(text: str) -> None:
    with pytest.raises(ConfigError, match="--vary"):
        parse_vary(text)


def test_vary_reads_values_as_the_file_would() -> None:
    assert parse_vary("training.lr=1e-4,5e-5").values == (1e-4, 5e-5)
    assert parse_vary("algorithm.use_pf_ppo=true,false").values == (True, False)
    assert parse_vary("algorithm.kl_estimator=k1,k3+").values == ("k1", "k3+")
    assert parse_vary("reward_model.clip=null,[-1, 1]").values == (None, [-1, 1])


def test_an_unknown_varied_key_is_named_with_its_neighbour(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="use_pf_ppo"):
        arms_of(recipe, (), [VaryConfig(key="algorithm.use_pf_pp", values=(True, False))], None, False)


def test_along_needs_an_entry_for_every_value(recipe: Path) -> None:
    recipe.write_text(f"{CONFIG}compare: {{vary: [{{key: algorithm.lam, values: [0.9, 1.0], along: [{{}}]}}]}}\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml:6.*one for each value"):
        load_config(recipe)


def test_the_folder_is_found_again_with_more_seeds_and_not_with_other_arms(recipe: Path) -> None:
    arms = arms_of(recipe, (), [POSTURE], None, False)
    other = arms_of(recipe, ("training.lr=1e-3",), [POSTURE], None, False)
    assert comparison_folder(arms, "recipe") == comparison_folder(arms, "recipe")
    assert comparison_folder(arms, "recipe") != comparison_folder(other, "recipe")
    named = arms_of(recipe, ("run.name=mine",), [POSTURE], None, False)
    assert comparison_folder(named, "recipe") == Path("runs/compare-mine")


def test_a_folder_with_runs_of_another_config_is_refused_before_anything_runs(recipe: Path, tmp_path: Path) -> None:
    arms = arms_of(recipe, (), [POSTURE], None, False)
    (run, *_) = plan_runs(arms, 1, tmp_path / "out")
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(write_config(run).read_text())
    assert plan_runs(arms, 1, tmp_path / "out")
    other = arms_of(recipe, ("critic.lr=0.5",), [POSTURE], None, False)
    with pytest.raises(ConfigError, match=r"run of another config lies there; it differs in critic\.lr"):
        plan_runs(other, 1, tmp_path / "out")


def test_whole_pairs_come_first_and_each_has_a_config_that_trains_alone(recipe: Path, tmp_path: Path) -> None:
    arms = arms_of(recipe, ("training.seed=5",), [POSTURE], None, False)
    runs = plan_runs(arms, 2, tmp_path / "out")
    assert [(run.arm.label, run.seed) for run in runs] == [
        ("use_pf_ppo=true", 5),
        ("use_pf_ppo=false", 5),
        ("use_pf_ppo=true", 6),
        ("use_pf_ppo=false", 6),
    ]
    path = write_config(runs[3])
    written = load_config(path).config
    assert written.training.seed == 6
    assert not written.algorithm.use_pf_ppo
    assert (written.run.dir, written.run.name) == (str(tmp_path / "out"), "use_pf_ppo=false-seed6")
    assert "compare" not in yaml.safe_load(path.read_text())
