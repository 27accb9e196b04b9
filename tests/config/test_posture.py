"""What `auto` becomes (formulas of the two postures) and the checks on the KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from klimb.config.load import load_config
from klimb.config.posture import AUTO_KEYS, Posture, filled, resolve
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError

from .conftest import MODEL, Load

POSTURES: dict[bool, dict[str, Any]] = {
    True: {
        "name": "explicit",
        "lr": 1e-6,
        "lam": 0.95,
        "kl_in_reward": False,
        "kl_in_loss": True,
        "kl_type": "adaptive",
        "init_kl_coef": 0.05,
        "reward_clip": None,
    },
    False: {
        "name": "cached",
        "lr": 5e-7,
        "lam": 0.90,
        "kl_in_reward": True,
        "kl_in_loss": False,
        "kl_type": "fixed",
        "init_kl_coef": 0.02,
        "reward_clip": (-5.0, 5.0),
    },
}


def posture(load: Load, *overrides: str) -> Posture:
    return resolve(load(MODEL, *overrides).config)


@pytest.mark.parametrize("explicit", [True, False])
def test_the_switch_flips_the_posture_whole(load: Load, explicit: bool) -> None:
    p = posture(load, f"algorithm.use_pf_ppo={str(explicit).lower()}")
    assert {name: getattr(p, name) for name in POSTURES[explicit]} == POSTURES[explicit]
    assert (p.kl_loss_estimator, p.kl_reward_estimator) == ("k3+", "k1")
    assert p.needs_reference


USER_WINS: dict[str, tuple[str, str, Any]] = {
    "lr": ("training.lr", "3e-5", 3e-5),
    "lam": ("algorithm.lam", "0.5", 0.5),
    "kl_type": ("algorithm.kl_ctrl.type", "fixed", "fixed"),
    "adaptive": ("algorithm.kl_ctrl.type", "adaptive", "adaptive"),
    "init_kl_coef": ("algorithm.kl_ctrl.init_kl_coef", "0.3", 0.3),
    "clip": ("reward_model.clip", "[-1, 2]", (-1.0, 2.0)),
    "no clip": ("reward_model.clip", "null", None),
    "eval": ("eval.every_episodes", "77", 77),
}


@pytest.mark.parametrize("explicit", ["true", "false"])
@pytest.mark.parametrize(("key", "written", "expected"), USER_WINS.values(), ids=USER_WINS.keys())
def test_what_the_user_sets_wins(load: Load, explicit: str, key: str, written: str, expected: Any) -> None:
    p = posture(load, f"algorithm.use_pf_ppo={explicit}", f"{key}={written}")
    assert getattr(p, AUTO_KEYS[key]) == expected


KL_STATES = [
    # posture, in reward, in loss -> in reward, in loss
    ("true", "auto", "auto", False, True),
    ("true", "true", "auto", True, False),
    ("true", "false", "auto", False, True),
    ("true", "auto", "false", False, False),
    ("true", "true", "false", True, False),
    ("true", "false", "false", False, False),
    ("false", "auto", "auto", True, False),
    ("false", "false", "auto", False, False),
    ("false", "false", "true", False, True),
    ("false", "auto", "false", True, False),
    ("false", "auto", "true", False, True),
]


@pytest.mark.parametrize(("explicit", "reward", "loss", "in_reward", "in_loss"), KL_STATES)
def test_where_the_kl_sits(load: Load, explicit: str, reward: str, loss: str, in_reward: bool, in_loss: bool) -> None:
    p = posture(
        load,
        f"algorithm.use_pf_ppo={explicit}",
        f"algorithm.use_kl_in_reward={reward}",
        f"algorithm.use_kl_loss={loss}",
    )
    assert (p.kl_in_reward, p.kl_in_loss) == (in_reward, in_loss)
    assert p.needs_reference == (in_reward or in_loss)


@pytest.mark.parametrize(
    "keys",
    [
        ("algorithm.use_pf_ppo=true", "algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=true"),
        ("algorithm.use_pf_ppo=false", "algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=true"),
    ],
)
def test_both_places_only_when_allowed(load: Load, keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"count twice.*allow_both=true"):
        load(MODEL, *keys)
    p = posture(load, *keys, "algorithm.kl_ctrl.allow_both=true")
    assert p.kl_in_reward
    assert p.kl_in_loss


def test_a_set_estimator_serves_both_places(load: Load) -> None:
    both = ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=true", "algorithm.kl_ctrl.allow_both=true")
    p = posture(load, "algorithm.kl_estimator=k2", *both)
    assert (p.kl_loss_estimator, p.kl_reward_estimator) == ("k2", "k2")
    # Where there is no KL the field keeps its default, so that a filled config resolves to the same record.
    p = posture(load, "algorithm.kl_estimator=k2")
    assert (p.kl_loss_estimator, p.kl_reward_estimator) == ("k2", "k1")


@pytest.mark.parametrize("init", ["0.0009", "5.1", "0"])
def test_init_outside_the_clamps_is_refused_only_where_clamps_are_read(load: Load, init: str) -> None:
    with pytest.raises(ConfigError, match=r"min_kl_coef 0\.001 to max_kl_coef 5\.0"):
        load(MODEL, f"algorithm.kl_ctrl.init_kl_coef={init}")
    p = posture(load, f"algorithm.kl_ctrl.init_kl_coef={init}", "algorithm.kl_ctrl.type=fixed")
    assert p.init_kl_coef == float(init)


def test_the_clamps_themselves_are_allowed(load: Load) -> None:
    for init in (0.001, 5.0):
        assert posture(load, f"algorithm.kl_ctrl.init_kl_coef={init}").init_kl_coef == init


def test_the_clamps_upside_down_are_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="min <= init <= max"):
        load(MODEL, "algorithm.kl_ctrl.min_kl_coef=0.1", "algorithm.kl_ctrl.max_kl_coef=0.01")


@pytest.mark.parametrize(("horizon", "ok"), [("204.8", False), ("204", False), ("205", True)])
def test_the_horizon_must_outlast_a_phase(load: Load, horizon: str, ok: bool) -> None:
    """0.2 x 1024 / horizon < 1."""
    if ok:
        assert posture(load, f"algorithm.kl_ctrl.horizon={horizon}").kl_type == "adaptive"
    else:
        with pytest.raises(ConfigError, match=r"horizon above 204\.8"):
            load(MODEL, f"algorithm.kl_ctrl.horizon={horizon}")


@pytest.mark.parametrize(("episodes", "every"), [(20000, 2000), (25, 3), (7, 1), (1, 1)])
def test_auto_evaluates_ten_times(load: Load, episodes: int, every: int) -> None:
    assert posture(load, f"training.total_episodes={episodes}").eval_every == every


CROSSED = [
    (),
    ("algorithm.use_pf_ppo=false",),
    ("algorithm.use_kl_in_reward=true",),
    ("algorithm.use_pf_ppo=false", "algorithm.use_kl_in_reward=false", "algorithm.use_kl_loss=true"),
    ("algorithm.use_kl_loss=false",),
    ("algorithm.kl_estimator=k1+", "reward_model.clip=[-2, 2]", "training.total_episodes=333"),
    ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=true", "algorithm.kl_ctrl.allow_both=true"),
]


@pytest.mark.parametrize("overrides", CROSSED)
def test_the_filled_config_reloads_to_the_same_run(load: Load, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = load(MODEL, *overrides).config
    complete = filled(config, resolve(config))
    place = tmp_path / "config.yaml"
    place.write_text(yaml.safe_dump(complete.model_dump(mode="json"), sort_keys=False))
    again = RunConfig.load(place)
    assert resolve(again) == resolve(config)
    assert again == complete
    assert filled(again, resolve(again)) == again


def test_every_auto_key_is_filled(load: Load) -> None:
    config = load().config
    tree = filled(config, resolve(config)).model_dump()
    for key in AUTO_KEYS:
        found: Any = tree
        for part in key.split("."):
            found = found[part]
        assert found != "auto", key


def test_load_refuses_what_resolve_refuses_and_names_the_line(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(MODEL + "algorithm:\n  kl_ctrl:\n    horizon: 10\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:4: algorithm\.kl_ctrl\.horizon 10 is too short"):
        load_config(place)
