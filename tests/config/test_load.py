"""The loader: what is refused, with which words, and what the defaults are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from klimb.config.load import known_keys, load_config
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError

from .conftest import MODEL, Load

ARTICLE = """\
actor_rollout_ref:
  model_path: /path/to/sft_model
  rollout_provider: vllm
  rollout_batch_size: 1024
  temperature: 0.7
  max_tokens: 2048
  use_dynamic_bsz: true
algorithm:
  use_pf_ppo: true
  adv_estimator: gae
  use_kl_in_reward: false
  kl_ctrl: {type: adaptive, horizon: 10000, target_kl: 0.02, init_kl_coef: 0.05, min_kl_coef: 0.001, max_kl_coef: 5.0}
reward_model: {model_path: /path/to/reward_model, reward_batch_size: 512}
training: {trainer: fsdp, micro_batch_size: 4, gradient_accumulation_steps: 8, lr: 1.0e-6, lr_scheduler: cosine, total_episodes: 20000, save_freq: 2000}
"""  # noqa: E501

DEFAULTS: dict[str, Any] = {
    "actor_rollout_ref.adapter_path": None,
    "actor_rollout_ref.lora": None,
    "actor_rollout_ref.ref_model_path": None,
    "actor_rollout_ref.trust_remote_code": False,
    "actor_rollout_ref.rollout_provider": "hf",
    "actor_rollout_ref.vllm.memory_share": 0.5,
    "actor_rollout_ref.vllm.tensor_parallel": 1,
    "actor_rollout_ref.rollout_batch_size": 1024,
    "actor_rollout_ref.rollouts_per_prompt": 1,
    "actor_rollout_ref.rollout_slots": "auto",
    "actor_rollout_ref.temperature": 0.7,
    "actor_rollout_ref.top_p": 1.0,
    "actor_rollout_ref.top_k": 0,
    "actor_rollout_ref.stop": (),
    "actor_rollout_ref.max_tokens": 2048,
    "actor_rollout_ref.use_dynamic_bsz": True,
    "actor_rollout_ref.max_tokens_per_micro_batch": 16384,
    "algorithm.use_pf_ppo": True,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_by_std": True,
    "algorithm.policy_loss": "clip",
    "algorithm.loss_agg": "token-mean",
    "algorithm.gamma": 1.0,
    "algorithm.lam": "auto",
    "algorithm.clip_ratio_low": 0.2,
    "algorithm.clip_ratio_high": 0.2,
    "algorithm.dual_clip": 3.0,
    "algorithm.entropy_coef": 0.0,
    "algorithm.ppo_epochs": 1,
    "algorithm.use_kl_in_reward": "auto",
    "algorithm.use_kl_loss": "auto",
    "algorithm.kl_estimator": "auto",
    "algorithm.kl_ctrl.type": "auto",
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.02,
    "algorithm.kl_ctrl.init_kl_coef": "auto",
    "algorithm.kl_ctrl.min_kl_coef": 0.001,
    "algorithm.kl_ctrl.max_kl_coef": 5.0,
    "algorithm.kl_ctrl.allow_both": False,
    "algorithm.filter_groups": False,
    "algorithm.loss_args": {},
    "algorithm.truncated": "score",
    "algorithm.rollout_correction.weights": "none",
    "algorithm.rollout_correction.cap": 2.0,
    "algorithm.rollout_correction.low": None,
    "algorithm.rollout_correction.normalize": False,
    "algorithm.rollout_correction.reject": None,
    "algorithm.policy_filtration.strategy": "none",
    "algorithm.policy_filtration.power": 2.0,
    "critic.model_path": None,
    "critic.lr": 1e-5,
    "critic.value_clip": 0.5,
    "critic.warmup_phases": 0,
    "reward_model.model_path": None,
    "reward_model.reward_batch_size": 512,
    "training.activation_checkpointing": False,
    "training.micro_batch_fallback": False,
    "training.offload.params": False,
    "training.offload.optimizer": False,
    "training.keep_freed_memory": "auto",
    "reward_model.functions": (),
    "reward_model.clip": "auto",
    "reward_model.normalize": "none",
    "reward_model.timeout_seconds": 10,
    "reward_model.workers": 2,
    "reward_model.on_failure": "drop",
    "reward_model.max_failed_fraction": 0.1,
    "data.train_files": (),
    "data.eval_files": (),
    "data.prompt_key": "prompt",
    "data.answer_key": "answer",
    "data.system_prompt": None,
    "data.max_prompt_tokens": 1024,
    "data.overlong_prompts": "error",
    "data.shuffle": True,
    "training.trainer": "single",
    "training.num_processes": 1,
    "training.micro_batch_size": 4,
    "training.gradient_accumulation_steps": 8,
    "training.lr": "auto",
    "training.lr_scheduler": "cosine",
    "training.warmup_ratio": 0.0,
    "training.weight_decay": 0.01,
    "training.max_grad_norm": 1.0,
    "training.total_episodes": 20000,
    "training.total_epochs": None,
    "training.save_freq": 2000,
    "training.keep_checkpoints": 3,
    "training.dtype": "auto",
    "training.seed": 0,
    "training.resume": "auto",
    "eval.before_training": True,
    "eval.every_episodes": "auto",
    "eval.max_prompts": 256,
    "eval.temperature": 0.0,
    "eval.top_p": 1.0,
    "eval.top_k": 0,
    "eval.samples_per_prompt": 1,
    "eval.metric": "reward",
    "diagnostics.on_alarm": "warn",
    "diagnostics.max_interventions": 4,
    "diagnostics.healthy_every_phases": 10,
    "logging.tensorboard": True,
    "logging.wandb": None,
    "logging.mlflow": None,
    "logging.trackio": None,
    "logging.samples_per_phase": 8,
    "run.name": None,
    "run.dir": "runs",
    "cluster.kind": "local",
    "cluster.address": None,
    "cluster.num_workers": None,
    "cluster.max_restarts": 3,
    "compare.vary": (),
    "compare.every": 50,
    "compare.seeds": 1,
}
SECTIONS = {key for key, _ in known_keys() if any(other.startswith(key + ".") for other, _ in known_keys())}
LEAVES = [key for key, _ in known_keys() if key not in SECTIONS]


def refused(load: Load, text: str = MODEL, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(text, *overrides)
    return str(error.value)


def value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


CF_01 = {
    "misspelt": (MODEL + "training:\n  lrr: 1.0e-6\n", (), ("recipe.yaml:3", "training.lrr", "'training.lr'")),
    "misplaced": (MODEL + "\nlearning_rate: 1.0e-6\n", (), ("recipe.yaml:3", "learning_rate", "'training.lr'")),
    "empty": (MODEL + "training: {lr: }\n", (), ("recipe.yaml:2", "training.lr", "null", "cannot be")),
    "override": (MODEL, ("training.lrr=1.0e-6",), ("override training.lrr=1.0e-6", "'training.lr'")),
}


@pytest.mark.parametrize(("text", "overrides", "words"), CF_01.values(), ids=CF_01.keys())
def test_case_CF_01_a_wrong_key_is_refused_with_the_nearest(
    load: Load, text: str, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = refused(load, text, *overrides)
    for word in words:
        assert word in message


def test_case_CF_02_an_exponent_without_a_point_is_a_number(load: Load) -> None:
    config = load(MODEL + "training: {lr: 1e-6, weight_decay: 1E-8}\n").config
    assert (config.training.lr, config.training.weight_decay) == (1e-6, 1e-8)
    assert isinstance(config.training.lr, float)
    assert yaml.safe_load("1e-6") == "1e-6", "a plain reader gives text; that is why ours exists"


def test_case_CF_02_a_wrong_type_names_key_and_type(load: Load) -> None:
    message = refused(load, MODEL + "training: {lr: fast}\n")
    assert "recipe.yaml:2: training.lr is 'fast'" in message
    assert "number" in message


def test_the_article_loads_word_for_word(load: Load) -> None:
    loaded = load(ARTICLE)
    config = loaded.config
    expected = {
        f"{section}.{key}": v
        for section, keys in yaml.safe_load(ARTICLE).items()
        for key, v in keys.items()
        if not isinstance(v, dict)
    }
    expected |= {f"algorithm.kl_ctrl.{k}": v for k, v in yaml.safe_load(ARTICLE)["algorithm"]["kl_ctrl"].items()}
    expected["training.lr"] = 1e-6
    for key, v in expected.items():
        assert value(config, key) == v
        assert loaded.origins[key].rpartition("recipe.yaml:")[2].isdecimal()
    assert loaded.origins["algorithm.kl_ctrl.horizon"].endswith("recipe.yaml:12")


def test_the_defaults_are_those_of_the_design(load: Load) -> None:
    config = load().config
    assert {key: value(config, key) for key in LEAVES if key != "actor_rollout_ref.model_path"} == DEFAULTS


def test_every_key_is_described() -> None:
    sections = {
        "actor_rollout_ref",
        "algorithm",
        "critic",
        "reward_model",
        "data",
        "training",
        "eval",
        "diagnostics",
        "logging",
        "cluster",
        "run",
        "compare",
    }
    nested = {"kl_ctrl", "rollout_correction", "policy_filtration"}
    assert (
        sections | {f"algorithm.{name}" for name in nested} | {"actor_rollout_ref.vllm", "training.offload"} == SECTIONS
    )
    for key, info in known_keys():
        assert key in SECTIONS or (info.description or "").strip(), f"{key} has no description"


TAKES_A_MAPPING = (
    *("actor_rollout_ref.lora", "algorithm.loss_args"),
    *("algorithm.truncated", "algorithm.rollout_correction.reject"),
)


@pytest.mark.parametrize("key", LEAVES)
def test_a_value_of_a_wrong_type_is_refused_with_its_key(load: Load, key: str) -> None:
    lists = isinstance(DEFAULTS.get(key), tuple) or key == "reward_model.clip"
    wrong = "[[1]]" if lists or key in TAKES_A_MAPPING else "{no_such: 1}"
    message = refused(load, MODEL, f"{key}={wrong}")
    assert f"override {key}=" in message
    assert f"{key} is " in message or f"{key}.0 is " in message
    assert "allowed: " in message


@pytest.mark.parametrize("key", [k for k in LEAVES if DEFAULTS.get(k, "") is not None])
def test_null_is_refused_where_off_makes_no_sense(load: Load, key: str) -> None:
    if key in ("algorithm.dual_clip", "critic.value_clip", "reward_model.clip"):
        assert value(load(MODEL, f"{key}=null").config, key) is None
        return
    assert f"{key} is null" in refused(load, MODEL, f"{key}=null")


def test_lora_is_a_section_or_null_and_has_no_dropout(load: Load) -> None:
    lora = load(MODEL, "actor_rollout_ref.lora={rank: 8}").config.actor_rollout_ref.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 32, "all-linear")
    lora = load(MODEL, "actor_rollout_ref.lora.target_modules=[q_proj, v_proj]").config.actor_rollout_ref.lora
    assert lora is not None
    assert (lora.rank, lora.target_modules) == (16, ("q_proj", "v_proj"))
    message = refused(load, MODEL, "actor_rollout_ref.lora={rank: 8, dropout: 0.05}")
    assert "unknown key 'actor_rollout_ref.lora.dropout'; klimb has no dropout" in message
    assert "'actor_rollout_ref.lora.rank'" in refused(load, MODEL, "actor_rollout_ref.lora={rnk: 8}")
    for wrong in ("{rank: 0}", "{alpha: x}", "{target_modules: []}", "{target_modules: q_proj}"):
        message = refused(load, MODEL, f"actor_rollout_ref.lora={wrong}")
        assert f"actor_rollout_ref.lora.{wrong[1:].partition(':')[0]} is " in message


TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ("recipe.yaml:1", "empty", "actor_rollout_ref.model_path")),
    "comments only": ("# nothing\n", ("recipe.yaml:1", "empty")),
    "a list": ("- a\n", ("recipe.yaml:1", "mapping")),
    "a number": ("5\n", ("recipe.yaml:1", "mapping")),
    "open bracket": (MODEL + "training: [\n", ("recipe.yaml:3", "not valid YAML")),
    "a tab": (MODEL + "training:\n\tlr: 1\n", ("recipe.yaml:3", "not valid YAML")),
    "two documents": (MODEL + "---\nrun: {}\n", ("recipe.yaml:2", "not valid YAML")),
    "a control character": (MODEL + "\x00", ("recipe.yaml", "not valid YAML")),
    "a tag that builds objects": (MODEL + "run: !!python/object:os.system {}\n", ("recipe.yaml:2", "not valid YAML")),
    "an unhashable key": (MODEL + "? [a]\n: 1\n", ("recipe.yaml:2", "not valid YAML")),
    "an alias that holds itself": ("actor_rollout_ref: &a\n  model_path: m\n  x: *a\n", ("recipe.yaml", "alias")),
    "nested too deeply": ("[" * 3000, ("recipe.yaml", "too deeply")),
    "an endless integer": (MODEL + f"training: {{seed: {'9' * 5000}}}\n", ("recipe.yaml", "cannot be read")),
    "a key twice": (MODEL + "training:\n  lr: 1\n  lr: 2\n", ("recipe.yaml:4", "training.lr", "twice", "line 3")),
    "a section twice": (MODEL + MODEL, ("recipe.yaml:2", "actor_rollout_ref is given twice")),
    "a key twice in a list": (
        MODEL + "reward_model:\n  functions:\n    - name: regex\n      name: math\n",
        ("recipe.yaml:5", "reward_model.functions.0.name is given twice"),
    ),
    "an unknown key in a list": (
        MODEL + "reward_model:\n  functions:\n    - name: regex\n      wieght: 2\n",
        ("recipe.yaml:5", "reward_model.functions.0.wieght", "'reward_model.functions.0.weight'"),
    ),
    "a list for a section": (MODEL + "training: [1]\n", ("recipe.yaml:2", "training is [1]", "section")),
    "nothing but a section's name": ("actor_rollout_ref:\n", ("recipe.yaml:1", "actor_rollout_ref is null")),
    "no model": ("training: {lr: 1}\n", ("recipe.yaml:1", "actor_rollout_ref is missing")),
    "no model path": ("run: {}\nactor_rollout_ref: {}\n", ("recipe.yaml:2", "actor_rollout_ref.model_path is missing")),
    "a number key": (MODEL + "training: {1: 2}\n", ("recipe.yaml:2", "unknown key 'training.1'")),
    "a typo in a section": (MODEL + "trainig: {lr: 1}\n", ("recipe.yaml:2", "'trainig'", "'training'")),
    "another section's key": (MODEL + "training: {horizon: 5}\n", ("recipe.yaml:2", "algorithm.kl_ctrl.horizon")),
    "a typo in a mapping that stands for a word": (
        MODEL + "algorithm: {truncated: {penlty: 1}}\n",
        ("recipe.yaml:2", "'algorithm.truncated.penlty'", "'algorithm.truncated.penalty'"),
    ),
    "a bad number in it": (
        MODEL + "algorithm: {truncated: {penalty: -1}}\n",
        ("recipe.yaml:2: algorithm.truncated.penalty is -1", "greater than 0"),
    ),
    "a missing number in it": (
        MODEL + "algorithm: {truncated: {overlong_buffer: 4}}\n",
        ("recipe.yaml:2", "algorithm.truncated.penalty is missing"),
    ),
    "neither word nor mapping": (
        MODEL + "algorithm: {truncated: bootstrapp}\n",
        ("recipe.yaml:2", "did you mean 'bootstrap'?"),
    ),
    "a buffer longer than the limit": (
        "actor_rollout_ref: {model_path: m, max_tokens: 8}\nalgorithm: {truncated: {penalty: 1, overlong_buffer: 9}}\n",
        ("recipe.yaml:2", "overlong_buffer is 9", "max_tokens 8"),
    ),
    "bootstrap without a critic": (
        "actor_rollout_ref: {model_path: m, rollouts_per_prompt: 4}\n"
        "algorithm: {truncated: bootstrap, adv_estimator: rloo}",
        ("recipe.yaml:2", "rloo has no critic", "score, exclude or a penalty"),
    ),
    "an unknown criterion": (
        MODEL + "algorithm: {rollout_correction: {reject: {criterion: token_vetto, lo: 0.1}}}\n",
        ("recipe.yaml:2: algorithm.rollout_correction.reject.criterion is 'token_vetto'", "'token_veto'"),
    ),
    "a criterion without its bound": (
        MODEL + "algorithm: {rollout_correction: {reject: {criterion: seq_mean_k1}}}\n",
        ("recipe.yaml:2", "seq_mean_k1 needs lo or hi"),
    ),
    "a bound that the criterion has not": (
        MODEL + "algorithm: {rollout_correction: {reject: {criterion: seq_mean_k3, lo: 0.1, hi: 1}}}\n",
        ("recipe.yaml:2", "reject.lo is set", "has only hi"),
    ),
    "bounds the wrong way round": (
        MODEL + "algorithm: {rollout_correction: {reject: {criterion: seq_mean_k1, lo: 2, hi: 1}}}\n",
        ("recipe.yaml:2", "lo 2 to hi 1", "needed: lo < 1 < hi"),
    ),
    "an empty band": (
        MODEL + "algorithm: {rollout_correction: {weights: band, cap: 0.5}}\n",
        ("recipe.yaml:2", "from low 2 to cap 0.5", "cap must be above 1"),
    ),
    "an estimator that is none": (
        MODEL + "algorithm: {adv_estimator: maxlr}\n",
        ("recipe.yaml:2", "'maxlr'", "did you mean 'maxrl'?", "reinforce_pp_baseline"),
    ),
    "a loss that is none": (MODEL + "algorithm: {policy_loss: ppo}\n", ("recipe.yaml:2", "'ppo'", "clip, gspo")),
    "a setting of another loss": (
        MODEL + "algorithm: {loss_args: {tau_positive: 1.0}}\n",
        ("recipe.yaml:2", "clip has none of its own", "policy_loss sapo has it"),
    ),
    "a typo in a loss's setting": (
        MODEL + "algorithm: {policy_loss: sapo, loss_args: {tau_positve: 1.0}}\n",
        ("recipe.yaml:2", "did you mean 'tau_positive'?"),
    ),
    "a loss's setting out of range": (
        MODEL + "algorithm: {policy_loss: sapo, loss_args: {tau_negative: 0}}\n",
        ("recipe.yaml:2", "algorithm.loss_args.tau_negative is 0", "greater than 0"),
    ),
    "groups of one to filter": (MODEL + "algorithm: {filter_groups: true}\n", ("recipe.yaml:2", "set it to 4 or more")),
    "groups of one to rank": (
        MODEL + "algorithm: {policy_filtration: {strategy: best_of_n}}\n",
        ("recipe.yaml:2", "best_of_n ranks", "set it to 4 or more"),
    ),
    "groups of one to compare": (
        MODEL + "algorithm: {adv_estimator: opo}\n",
        ("recipe.yaml:2", "opo compares", "is 1"),
    ),
    "a third-level typo": (MODEL + "algorithm: {kl_ctrl: {horizn: 5}}\n", ("'algorithm.kl_ctrl.horizon'",)),
}


@pytest.mark.parametrize(("text", "words"), TEXTS.values(), ids=TEXTS.keys())
def test_a_bad_file_names_its_line(load: Load, text: str, words: tuple[str, ...]) -> None:
    message = refused(load, text)
    for word in words:
        assert word in message
    assert "\n" not in message


OVERRIDES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no equals": (("training.lr",), ("'training.lr'", "section.key=value")),
    "no key": (("=3",), ("'=3'", "section.key=value")),
    "empty part": (("training..lr=3",), ("section.key=value",)),
    "space in the key": (("a b=3",), ("section.key=value",)),
    "bad YAML": (("training.lr=[1",), ("override training.lr=[1", "not valid YAML")),
    "control character": (("training.lr=\x01",), ("override training.lr=", "not valid YAML")),
    "a key twice": (("training={lr: 1, lr: 2}",), ("training.lr is given twice",)),
    "a section becomes a scalar": (("training=3",), ("override training=3", "training is 3", "section")),
    "below a scalar": (("training.lr.x=3",), ("override training.lr.x=3", "training.lr is {'x': 3}")),
    "below a list": (
        ("data.train_files=[a]", "data.train_files.0=b"),
        ("'data.train_files.0=b'", "data.train_files is ['a']", "not a section"),
    ),
    "unknown section": (("TRAINING.lr=3",), ("override TRAINING.lr=3", "unknown key 'TRAINING'")),
    "a scalar for a list": (("data.train_files=a",), ("data.train_files is 'a'", "a list")),
    "numbers for texts": (("data.train_files=[1]",), ("data.train_files.0 is 1", "string")),
    "a near choice": (("algorithm.adv_estimator=grp",), ("did you mean 'grpo'",)),
    "nan": (("algorithm.gamma=.nan",), ("algorithm.gamma is nan", "finite")),
    "infinite": (("training.lr=1e400",), ("training.lr is inf", "finite")),
    "negative": (("training.lr=-1e-6",), ("training.lr is -1e-06", "greater than 0")),
    "a boolean for a number": (("training.lr=true",), ("training.lr is True", "number")),
    "a float for a count": (("training.total_episodes=1e3",), ("1000.0", "whole number")),
    "YAML 1.1's no": (("algorithm.norm_by_std=no",), ("'no'", "boolean")),
    "half a clip": (("reward_model.clip=[1]",), ("reward_model.clip is [1]", "two numbers")),
    "a clip upside down": (("reward_model.clip=[1,-1]",), ("override reward_model.clip", "below the second")),
    "G does not divide": (
        ("actor_rollout_ref.rollouts_per_prompt=3",),
        ("override actor_rollout_ref.rollouts_per_prompt=3", "does not divide", "1024"),
    ),
    "greedy training": (("actor_rollout_ref.temperature=0",), ("override actor_rollout_ref.temperature=0", "above 0")),
    "top_k in training": (("actor_rollout_ref.top_k=5",), ("override actor_rollout_ref.top_k=5", "biased")),
    "a group of one": (("algorithm.adv_estimator=rloo",), ("override algorithm.adv_estimator=rloo", "set it to 4")),
    "pass at one": (("eval.metric=pass_at_k",), ("override eval.metric=pass_at_k", "above 1")),
    "processes without fsdp": (("training.num_processes=2",), ("override training.num_processes=2", "fsdp")),
    "KL twice": (
        ("algorithm.use_kl_loss=true", "algorithm.use_kl_in_reward=true"),
        ("override algorithm.use_kl_in_reward=true", "count twice", "allow_both"),
    ),
    "init outside the clamps": (
        ("algorithm.kl_ctrl.init_kl_coef=9",),
        ("override algorithm.kl_ctrl.init_kl_coef=9", "min <= init <= max"),
    ),
    "horizon too short": (("algorithm.kl_ctrl.horizon=100",), ("override algorithm.kl_ctrl.horizon=100", "204.8")),
}


@pytest.mark.parametrize(("overrides", "words"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_a_bad_override_is_named(load: Load, overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    message = refused(load, MODEL, *overrides)
    for word in words:
        assert word in message


def test_overrides_reach_every_depth_and_the_last_wins(load: Load) -> None:
    loaded = load(
        MODEL + "training: {lr: 1, seed: 3}\nreward_model: {functions: [{name: regex}]}\n",
        "training.lr=2e-5",
        "training.lr=3e-5",
        "algorithm.kl_ctrl.type=fixed",
        "data.train_files=[a.jsonl, task:arithmetic]",
        "reward_model.functions=[{name: math, weight: 2}, {name: length, args: {limit: 5}}]",
        "algorithm.dual_clip=null",
        "actor_rollout_ref.stop=[5, '###']",
    )
    config = loaded.config
    assert (config.training.lr, config.training.seed) == (3e-5, 3)
    assert config.algorithm.kl_ctrl.type == "fixed"
    assert config.data.train_files == ("a.jsonl", "task:arithmetic")
    assert [(f.name, f.weight, f.args) for f in config.reward_model.functions] == [
        ("math", 2.0, {}),
        ("length", 1.0, {"limit": 5}),
    ]
    assert config.algorithm.dual_clip is None
    assert config.actor_rollout_ref.stop == (5, "###")
    assert loaded.origins["training.lr"] == "override training.lr=3e-5"
    assert loaded.origins["training.seed"].endswith("recipe.yaml:2")
    assert "data.eval_files" not in loaded.origins


def test_an_override_of_a_section_replaces_all_of_it(load: Load) -> None:
    loaded = load(MODEL + "training: {lr: 1, seed: 3}\n", "training={lr: 2e-5}")
    assert (loaded.config.training.lr, loaded.config.training.seed) == (2e-5, 0)
    assert loaded.origins["training.lr"] == "override training={lr: 2e-5}"
    assert "training.seed" not in loaded.origins


def test_an_override_fills_a_section_left_empty(load: Load) -> None:
    assert load(MODEL + "training:\n", "training.lr=2e-5").config.training.lr == 2e-5


SCALARS: list[tuple[str, Any]] = [
    ("1e-6", 1e-6), ("1E-6", 1e-6), ("+1e-6", 1e-6), ("1.e-6", 1e-6), (".5", 0.5), ("-3", -3), ("010", 10),
    ("1_000", "1_000"), ("0x10", "0x10"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
    ("true", True), ("False", False), ("TRUE", True), ("yes", "yes"), ("no", "no"), ("off", "off"), ("y", "y"),
    ("~", None), ("null", None), ("''", ""), ("'1e-6'", "1e-6"), ("-.inf", -math.inf), ("1e", "1e"), (".", "."),
]  # fmt: skip


@pytest.mark.parametrize(("written", "read"), SCALARS)
def test_scalars_are_read_by_yaml_1_2(load: Load, written: str, read: Any) -> None:
    config = load(MODEL + f"reward_model: {{functions: [{{name: regex, args: {{x: {written}}}}}]}}\n").config
    found = config.reward_model.functions[0].args["x"]
    assert found == read
    assert type(found) is type(read)


def test_merge_keys_aliases_bom_and_line_ends_work(load: Load, tmp_path: Path) -> None:
    text = "\ufeff" + MODEL + "training: &t {lr: 1e-4}\ncritic: *t\n"
    assert load(text).config.critic.lr == 1e-4
    (tmp_path / "crlf.yaml").write_bytes((MODEL + "training: {lr: 1e-4}\n").replace("\n", "\r\n").encode())
    assert load_config(tmp_path / "crlf.yaml").config.training.lr == 1e-4


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "arithmetic.yaml").write_text(MODEL)
    with pytest.raises(ConfigError, match=r"arithmetc\.yaml: no such config file; did you mean .*arithmetic\.yaml"):
        RunConfig.load(tmp_path / "arithmetc.yaml")
    with pytest.raises(ConfigError, match=r"zzz: no such config file; .* holds: arithmetic\.yaml"):
        RunConfig.load(tmp_path / "zzz")
    with pytest.raises(ConfigError, match="holds: no YAML file"):
        RunConfig.load(tmp_path / "nowhere" / "a.yaml")


def test_a_folder_and_foreign_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.load(tmp_path)
    (tmp_path / "utf16.yaml").write_bytes(MODEL.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"utf16\.yaml: cannot be read"):
        RunConfig.load(tmp_path / "utf16.yaml")


def test_all_wrong_types_are_told_at_once(load: Load) -> None:
    message = refused(load, MODEL + "training: {lr: fast, seed: x}\neval: {temperature: hot}\n")
    assert [line.split(" is ")[0].rpartition(" ")[2] for line in message.splitlines()] == [
        "training.lr",
        "training.seed",
        "eval.temperature",
    ]


def test_the_dumped_config_loads_to_the_same(load: Load, tmp_path: Path) -> None:
    config = load(ARTICLE, "reward_model.functions=[{name: regex, args: {x: 1e-9, y: 'no'}}]").config
    path = tmp_path / "dumped.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert RunConfig.load(path) == config
