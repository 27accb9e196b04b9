"""What must be there before a run can start: paths, a reward, an engine of this version.

A model is a folder, or a name for one that `klimb prepare` put into the cache.

`playground:sft`, `playground:reward_model` and `smollm2:` stand for folders in the cache, so that recipes
hold no machine's paths. The cache is $KLIMB_CACHE, else $XDG_CACHE_HOME/klimb, else ~/.cache/klimb.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from pathlib import Path

from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.errors import ConfigError, MissingExtra

PREPARED = {
    "playground:sft": ("playground", "sft"),
    "playground:reward_model": ("playground", "reward_model"),
    "smollm2:": ("smollm2",),
}
"""Name -> place in the cache; the first part is the argument of `klimb prepare`."""


NO_EVAL = "data.eval_files is empty; name the held-out prompts, for example data.eval_files=[task:arithmetic]"


def cache_folder() -> Path:
    if own := os.environ.get("KLIMB_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "klimb"


def make_folder(folder: Path) -> None:
    """Where a run is to be written; ConfigError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir: {folder} cannot be made ({error.strerror}); name a folder that can be written, "
            "for example run.dir=runs"
        ) from error


def model_folder(path: str) -> Path:
    """The folder behind a `model_path`. Does not look whether it exists."""
    if path in PREPARED:
        return cache_folder().joinpath(*PREPARED[path])
    if path.split(":")[0] in {parts[0] for parts in PREPARED.values()} and ":" in path:
        raise ConfigError(f"'{path}': no prepared model of that name; there are: {', '.join(PREPARED)}")
    return Path(path).expanduser()


def missing_model(key: str, path: str) -> str | None:
    """Why a model folder cannot be used, with the remedy, or None when it is there."""
    try:
        folder = model_folder(path)
    except ConfigError as error:
        return f"{key}: {error}"
    if (folder / "config.json").is_file():
        return None
    if path in PREPARED:
        return f"{key}: {path} is not prepared yet; run: klimb prepare {PREPARED[path][0]}"
    if folder.is_dir():
        return f"{key}: {folder} holds no config.json; it must be a Hugging Face model folder"
    return f"{key}: no such folder: {folder} (klimb loads local folders only and asks no hub){_nearest(folder)}"


def missing_paths(config: RunConfig) -> list[tuple[str, str]]:
    """Key and message for every path of the config that is not on this machine."""
    paths = {
        "actor_rollout_ref.model_path": config.actor_rollout_ref.model_path,
        "actor_rollout_ref.ref_model_path": config.actor_rollout_ref.ref_model_path,
        "critic.model_path": config.critic.model_path,
        "reward_model.model_path": config.reward_model.model_path,
    }
    out = [(key, text) for key, path in paths.items() if path is not None and (text := missing_model(key, path))]
    adapter = config.actor_rollout_ref.adapter_path
    if adapter is not None and not (Path(adapter).expanduser() / "adapter_config.json").is_file():
        key, place = "actor_rollout_ref.adapter_path", Path(adapter).expanduser()
        what = "holds no adapter_config.json; it must be a peft folder" if place.is_dir() else "no such folder"
        out.append((key, f"{key}: {place}: {what}{'' if place.is_dir() else _nearest(place)}"))
    for key, files in (("data.train_files", config.data.train_files), ("data.eval_files", config.data.eval_files)):
        out += [
            (key, f"{key}: no such file: {spec}{_nearest(Path(spec).expanduser())}")
            for spec in files
            if not spec.startswith(("task:", "gym:")) and not Path(spec).expanduser().exists()
        ]
    for index, function in enumerate(config.reward_model.functions):
        file, colon, _ = function.name.rpartition(":")
        if colon and file.endswith(".py") and not Path(file).expanduser().exists():
            key = f"reward_model.functions.{index}.name"
            out.append((key, f"{key}: no such file: {file}{_nearest(Path(file).expanduser())}"))
    return out


def _nearest(path: Path) -> str:
    """The file that was probably meant, or the first folder of the path that is not there."""
    try:
        found = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f" (nor is there a folder {path.parent})"
    near = difflib.get_close_matches(path.name, found, 1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


VLLM = "actor_rollout_ref.rollout_provider=vllm"


def check_runnable(config: RunConfig) -> None:
    """Everything that can be refused before torch is imported. Raises ConfigError or MissingExtra."""
    _check_engine(config)
    _check_one_process(config)
    missing = [text for _, text in missing_paths(config)]
    if missing:
        raise ConfigError("\n".join(missing))
    if not config.data.train_files:
        raise ConfigError("data.train_files is empty; name at least one file, or task:arithmetic")
    _check_reward(config)
    for key in ("adapter_path", "lora"):
        if getattr(config.actor_rollout_ref, key) is not None and importlib.util.find_spec("peft") is None:
            raise MissingExtra("peft", "lora", f"actor_rollout_ref.{key}")
    for service in ("wandb", "mlflow", "trackio"):
        if getattr(config.logging, service) is not None and importlib.util.find_spec(service) is None:
            raise MissingExtra(service, service, f"logging.{service}")
    resolve(config)


def _check_engine(config: RunConfig) -> None:
    """Refuse an engine that is not installed, or that does not go with the trainer."""
    key = "actor_rollout_ref.rollout_provider"
    if config.actor_rollout_ref.rollout_provider != "vllm":
        return
    if VLLM in only_alone(config):
        raise ConfigError(
            f"{key} is vllm and training.trainer is {config.training.trainer}: beside several ranks the engines are "
            f"Ray's to start. Set cluster.kind=ray (docs/cluster.md), {key}=hf or training.trainer=single"
        )
    check_engines(config)
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "vllm", f"{key}=vllm")


def check_engines(config: RunConfig) -> None:
    """Refuse ranks that cannot be divided among engines."""
    width, separate = config.actor_rollout_ref.vllm.tensor_parallel, config.actor_rollout_ref.rollout_provider == "vllm"
    if separate and config.cluster.kind == "ray" and config.num_ranks % width:
        raise ConfigError(
            f"actor_rollout_ref.vllm.tensor_parallel is {width}, but {config.num_ranks} ranks cannot be divided into "
            f"groups of {width}, one for each engine; set cluster.num_workers to a multiple of {width}"
        )


def only_alone(config: RunConfig) -> list[str]:
    """What is set beside trainer fsdp that this version does in one process only, or on a Ray cluster."""
    t, on_ray = config.training, config.cluster.kind == "ray"
    if config.is_alone:
        return []
    found = {
        VLLM: config.actor_rollout_ref.rollout_provider == "vllm" and not on_ray,
        "training.offload": t.offload.params or t.offload.optimizer,
        "training.micro_batch_fallback=true": t.micro_batch_fallback,
    }
    return [key for key, is_set in found.items() if is_set]


def _check_one_process(config: RunConfig) -> None:
    """Refuse what one process does and several ranks do not."""
    if found := only_alone(config):
        key = found[0].partition("=")[0]
        ranks = "cluster.kind is ray" if config.cluster.kind == "ray" else "training.trainer is fsdp"
        raise ConfigError(
            f"{key} is set and {ranks}; this version does it in one process only. Leave {key} out, or train in one "
            "process (training.trainer=single, cluster.kind=local)"
        )


def _check_reward(config: RunConfig) -> None:
    """Refuse a run in which nothing is rewarded."""
    r = config.reward_model
    if r.model_path is None and not any(f.weight != 0 for f in r.functions):
        tasks = [spec for spec in config.data.train_files if spec.startswith(("task:", "gym:"))]
        name = tasks[0].split(":")[0] if tasks else "exact_answer"
        raise ConfigError(
            "reward_model: nothing is rewarded: model_path is null and no function has a weight other than 0. "
            f"Add one, for example reward_model.functions=[{{name: {name}}}]"
        )
