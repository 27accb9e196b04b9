"""Optimizer states and weights on disk, whatever number of ranks writes or reads them.

Safetensors, by torch's distributed checkpoints where they are divided: every rank writes the parts it holds, and reads
those it needs. Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from klimb.ranks import Ranks

INDEX = "model.safetensors.index.json"


def save_optimizers(folder: Path, optimizers: Mapping[str, tuple[nn.Module, Optimizer]], ranks: Ranks) -> None:
    """Every rank's part of the states, by role: each of a module and the optimizer of its weights. None before the
    first step."""
    states = _states(optimizers)
    ranks.first(lambda: folder.mkdir(parents=True, exist_ok=True))
    if not _any_sharded(optimizers):
        ranks.first(lambda: save_file(states, folder / "model.safetensors"))
    elif states:
        with _as_os_errors():
            save(states, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_optimizers(folder: Path, optimizers: Mapping[str, tuple[nn.Module, Optimizer]]) -> None:
    """Put the states into the optimizers, in place; what was not there when they were written is forgotten."""
    files = list(folder.glob("*.safetensors"))
    saved = {name for file in files for name in _names(file)}
    for role, (module, optimizer) in optimizers.items():
        optimizer.state.clear()
        for name, parameter in _trained(module):
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{role}.{name}.{key}" in saved]
            for key in keys:
                count = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter][key] = count if key == "step" else torch.zeros_like(parameter.detach())
    states = _states(optimizers)
    if len(files) == 1 and not _any_sharded(optimizers):
        for name, value in load_file(files[0]).items():
            states[name].copy_(value)
    elif states:
        with _as_os_errors():
            load(states, storage_reader=HuggingFaceStorageReader(str(folder)))


def save_weights(folder: Path, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Divided weights as the one file of a Hugging Face folder; tied ones once."""
    with _as_os_errors():
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
        save(dict(weights), storage_writer=writer)
    ranks.first(lambda: _rename(folder))


def load_weights(folder: Path, module: nn.Module) -> None:
    """A Hugging Face folder's weights into a sharded module, in place; every rank reads its part."""
    values = {name: p.detach() for name, p in module.named_parameters()}
    with _as_os_errors():
        load(values, storage_reader=HuggingFaceStorageReader(str(folder)))


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def _any_sharded(optimizers: Mapping[str, tuple[nn.Module, Optimizer]]) -> bool:
    return any(is_sharded(module) for module, _ in optimizers.values())


def _rename(folder: Path) -> None:
    """To the name that transformers writes for a model of one file, without the parts it was joined from."""
    shutil.rmtree(folder / "sharded")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    (file,) = set(index["weight_map"].values())
    (folder / file).rename(folder / "model.safetensors")
    (folder / INDEX).unlink()


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _states(optimizers: Mapping[str, tuple[nn.Module, Optimizer]]) -> dict[str, Tensor]:
    return {
        f"{role}.{name}.{key}": value
        for role, (module, optimizer) in optimizers.items()
        for name, parameter in _trained(module)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


@contextmanager
def _as_os_errors() -> Generator[None]:
    """torch raises its own kind, which is no Exception, for a disk that refuses; and warns that one process is one."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise OSError(f"{type(first).__name__}: {first}") from None
