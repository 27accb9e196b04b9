"""LoRA: a small trainable adapter beside a frozen base. With the adapter off, the same module is the reference.

peft puts its layers into the model in place, so the model keeps its class and every pass goes on as before. Base
weights never change: what needs merged weights (engines, checkpoints, packed decoding) gets tensors of their own,
since adding the adapter and subtracting it again does not give the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from klimb.config.scale import LoraSettings
from klimb.errors import CheckpointError, ConfigError, MissingExtra
from klimb.models.load import body_of, head_of
from klimb.models.sharded import put, whole
from klimb.ranks import ALONE, Ranks

KEY = "actor_rollout_ref.lora"
WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"
"""peft's name for the one adapter there is."""
OUTSIDE = "base_model.model."
"""What peft puts before every name in an adapter's file."""


def add_lora(model: PreTrainedModel, settings: LoraSettings, seed: int, base: str | None = None) -> PreTrainedModel:
    """Freeze the model and put a float32 adapter into its body, in place. It starts at zero: the policy is its base.

    seed: of the first matrices; base: the folder that the adapter is for, None where no folder has these weights.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise MissingExtra("peft", "lora", KEY) from None
    targets = _targets(model, settings.target_modules)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=sorted(targets),
        # Without this peft warns that it sets it: transformers' Conv1D keeps its weight the other way round.
        fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in targets.values()),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    return model.eval()


def _targets(model: PreTrainedModel, wanted: tuple[str, ...] | str) -> dict[str, nn.Module]:
    """The linear layers of the body that get an adapter, by their names in the model."""
    inside = {id(module) for module in body_of(model).modules()} - {id(head_of(model))}
    layers: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D)
    }
    if wanted == "all-linear":
        return layers
    out: dict[str, nn.Module] = {}
    for word in wanted:
        found = {name: layer for name, layer in layers.items() if name == word or name.endswith("." + word)}
        if not found:
            kinds = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"{KEY}.target_modules names {word}, which is no linear layer of this model's body "
                f"({model.config.model_type}); there are: {', '.join(kinds)}. Name some of these, or write all-linear "
                "(the head and the embeddings stay as they are)"
            )
        out |= found
    return out


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name. Known by what they hold, so that peft is imported only where it is used."""
    return {name: module for name, module in model.named_modules() if _is_adapted(module)}


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def has_adapter(model: nn.Module) -> bool:
    return any(_is_adapted(module) for module in model.modules())


@contextmanager
def adapter_off(model: nn.Module) -> Generator[None]:
    """Inside, the model computes what its base computes, to the last bit."""
    with ExitStack() as stack:
        for layer in _adapted(model).values():
            layer.enable_adapters(False)
            stack.callback(layer.enable_adapters, True)
        yield


def merged_weight(layer: nn.Module) -> Tensor:
    """The weight of a linear layer; with an adapter base + adapter, a tensor of its own. No gradient."""
    if not _is_adapted(layer):
        return cast(Tensor, layer.weight).detach()
    with torch.no_grad():
        adapted = cast(Any, layer)
        return adapted.base_layer.weight + adapted.get_delta_weight(ADAPTER)


def weights_for_engine(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights as a plain Hugging Face model names them, tied ones once; an adapter is merged in, layer by
    layer as the iterator comes to it."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in _adapted(model).items()}
    for name, parameter in model.named_parameters():
        if name in layers:
            yield name.replace(".base_layer.", "."), merged_weight(layers[name])
        elif not _is_of_adapter(name):
            yield name.replace(".base_layer.", "."), parameter


def _is_of_adapter(name: str) -> bool:
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def _adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the names they have in a peft folder."""
    return {
        OUTSIDE + name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if _is_of_adapter(name)
    }


def save_plain(model: PreTrainedModel, folder: Path) -> None:
    """A Hugging Face folder that knows nothing of adapters. Merged weights are made in the host's memory."""
    if not has_adapter(model):
        model.save_pretrained(folder)
        return
    state = {name: tensor.detach().cpu() for name, tensor in weights_for_engine(model)}
    buffers = {name for name, _ in model.named_buffers()}
    state |= {name: tensor.cpu() for name, tensor in model.state_dict().items() if name in buffers}
    model.save_pretrained(folder, state_dict=state)


def save_adapter(model: PreTrainedModel, folder: Path, ranks: Ranks = ALONE) -> None:
    """The adapter alone, as a peft folder."""
    weights = {name: whole(p.detach()).cpu().contiguous() for name, p in _adapter_weights(model).items()}
    ranks.first(lambda: _write_adapter(model, weights, folder))


def _write_adapter(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config: Any = copy.deepcopy(cast(Any, model).peft_config[ADAPTER])
    config.target_modules, config.inference_mode = sorted(config.target_modules), True
    config.save_pretrained(folder)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Put a saved adapter's values into the model's, to the last bit."""
    try:
        saved = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: the adapter cannot be read: {error}") from None
    weights = _adapter_weights(model)
    if saved.keys() != weights.keys():
        other = sorted(saved.keys() ^ weights.keys())
        raise CheckpointError(f"{folder}: this adapter is for other layers than the model has, first {other[0]}")
    for name, parameter in weights.items():
        put(saved[name], parameter)


def check_base(model: PreTrainedModel, folder: Path) -> None:
    """Refuse a base that is not the one the adapter was trained on: base + adapter is then not what lies in `folder`,
    the plain model that was saved with the adapter. One weight at a time is read."""
    places: dict[str, Path] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    for name, tensor in weights_for_engine(model):
        if name not in places:
            continue
        with safe_open(places[name], "pt") as file:
            saved = file.get_tensor(name)
        if saved.shape != tensor.shape or not torch.allclose(saved, whole(tensor.detach()).cpu(), rtol=1e-4, atol=1e-6):
            raise CheckpointError(
                f"{folder}: base and adapter together are not the model that was saved, first in {name}: "
                "actor_rollout_ref.model_path (or adapter_path) holds other weights than when the run began. Put "
                "those back, or start a new run with training.resume=never"
            )
