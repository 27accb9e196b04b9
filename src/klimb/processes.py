"""Ranks as processes: joined where torchrun or Ray started them, started here where nobody did.

torch elastic starts, watches and restarts them; klimb only says what each one runs.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from klimb.config.schema import RunConfig
from klimb.errors import ConfigError, KlimbError
from klimb.interrupt import handling
from klimb.ranks import ALONE, Ranks

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another in one collective: a reward may take its time, a hang must end."""


def backend(with_gpu: bool) -> str:
    """What torch.distributed moves tensors by: objects and tensors of the host go by gloo everywhere."""
    return "cpu:gloo,cuda:nccl" if with_gpu else "gloo"


def is_rank() -> bool:
    """Whether somebody started this process as one of several."""
    return dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def num_started() -> int:
    """Ranks that were started, 1 where nobody started any."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_rank() else 1


def as_started(config: RunConfig) -> RunConfig:
    """The config with the number of ranks that were started from outside, or that Ray will start, which are always
    fsdp's. ConfigError where they cannot be used."""
    started, t, on_ray = num_started(), config.training, config.cluster.kind == "ray"
    if on_ray and not is_rank():
        of_ray = {"trainer": "fsdp", "num_processes": config.num_ranks}
        return config.model_copy(update={"training": t.model_copy(update=of_ray)})
    if not is_rank() or (config.is_alone and started == 1):
        return config
    if config.is_alone:
        raise ConfigError(
            f"training.trainer is single, but {started} ranks were started, which would each train the same; set "
            "training.trainer=fsdp, or start one process"
        )
    if "num_processes" in t.model_fields_set and t.num_processes != started:
        raise ConfigError(
            f"training.num_processes is {t.num_processes}, but {started} ranks were started; leave the key out, or "
            "start as many"
        )
    update: dict[str, Any] = {"training": t.model_copy(update={"trainer": "fsdp", "num_processes": started})}
    if on_ray:  # started by torchrun, or by Ray, which started as many as this key says
        update["cluster"] = config.cluster.model_copy(update={"num_workers": started})
    return config.model_copy(update=update)


@contextmanager
def joined(config: RunConfig) -> Generator[Ranks]:
    """The ranks that this process is one of, for as long as it works with them."""
    if config.training.trainer == "single":
        yield ALONE
        return
    own = not dist.is_initialized()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if own:
        dist.init_process_group(backend(torch.cuda.is_available()), timeout=PATIENCE)
    try:
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    finally:
        if own:
            dist.destroy_process_group()


@dataclass(frozen=True)
class Notes:
    """A folder of one launch, where ranks leave word for each other's next start and for who started them."""

    folder: Path

    @staticmethod
    def fresh(folder: Path) -> Notes:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return Notes(folder)

    def begin(self) -> bool:
        """Whether this is not the first start, asked by the first rank alone."""
        place = self.folder / "begun"
        again = place.exists()
        place.touch()
        return again

    @property
    def has_error(self) -> bool:
        return (self.folder / "error").exists()

    def leave_error(self, error: KlimbError) -> None:
        own = self.folder / f"error.{os.getpid()}"
        own.write_text(str(error), encoding="utf-8")
        own.replace(self.folder / "error")

    def raise_error(self) -> None:
        if self.has_error:
            raise KlimbError((self.folder / "error").read_text(encoding="utf-8"))


def start(work: Callable[..., T], arguments: tuple[Any, ...], num_processes: int, max_restarts: int) -> T:
    """Run work(*arguments, again) in so many local ranks and return what the first one returned.

    again: whether the ranks were started before. A rank that dies takes the others with it, and all start again, at
    most max_restarts times. A KlimbError ends them for good and is raised here.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="klimb-ranks-") as folder, handling(_left_to_ranks):
        notes = Notes(Path(folder))
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            max_restarts=max_restarts,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            run_id=f"klimb-{os.getpid()}",  # without a name of its own torch invents one and warns
            signals_to_handle="SIGHUP",
        )
        try:
            results = elastic_launch(launch, guarded)(work, arguments, notes)
        except ChildFailedError as error:
            notes.raise_error()
            raise _died(error, num_processes, max_restarts) from None
        notes.raise_error()
        return results[0]


def guarded(work: Callable[..., T], arguments: tuple[Any, ...], notes: Notes) -> T | None:
    """What each rank runs. A mistake of the user's is written down once: trying again would not mend it."""
    if notes.has_error:
        return None
    try:
        return work(*arguments, os.environ["RANK"] == "0" and notes.begin())
    except KlimbError as error:
        notes.leave_error(error)
        return None


def _died(error: Any, num_processes: int, max_restarts: int) -> Exception:
    """What to raise for the rank that was the first to die: killed from outside, or by a mistake of ours."""
    rank, first = error.get_first_failure()
    if isinstance(first.message, dict):
        told: dict[str, Any] = first.message
        return RuntimeError(f"rank {rank}: {told.get('extraInfo', {}).get('py_callstack', told.get('message'))}")
    who = f"rank {rank} of {num_processes}"
    if first.exitcode >= 0:
        return KlimbError(f"{who} ended with exit code {first.exitcode}; its output is above")
    return KlimbError(
        f"{who} was ended by signal {-first.exitcode}, more often than cluster.max_restarts ({max_restarts}) allows. "
        "If nobody killed it, memory ran out. The same command goes on from the newest checkpoint"
    )


def _left_to_ranks(number: int, frame: FrameType | None) -> None:
    """A terminal sends Ctrl-C to the ranks too, which end between two turns; SIGTERM comes here alone."""
    if number == signal.SIGTERM:
        for child in multiprocessing.active_children():
            child.terminate()
