"""Ranks as processes: joined where torchrun or Ray started them, started here where nobody did.

torch elastic starts, watches and restarts them; klimb only says what each one runs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from klimb.config.schema import RunConfig
from klimb.errors import ConfigError, KlimbError
from klimb.interrupt import STOPPING, handling
from klimb.ranks import ALONE, Ranks

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another in one collective: a reward may take its time, a hang must end."""
TOGETHER = 5.0
"""Seconds within which an error that all ranks find has been written down by all."""


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
def joined(config: RunConfig, stop: Path | None = None) -> Generator[Ranks]:
    """The ranks that this process is one of, for as long as it works with them. stop: Ranks.stop."""
    if config.training.trainer == "single":
        yield ALONE
        return
    own = not dist.is_initialized()
    if own:
        if torch.cuda.is_available():
            _take_gpu(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count())
        _meet()
    try:
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size(), stop=stop)
    finally:
        if own:
            dist.destroy_process_group()


def _meet() -> None:
    """Join torch's process group. After a restart torch's store still holds the addresses of the ranks before; whoever
    came first would wait for the dead, so that every start has a part of the store for itself."""
    store, rank, num_ranks = next(rendezvous("env://", timeout=PATIENCE))
    own = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    on = backend(torch.cuda.is_available())
    dist.init_process_group(on, store=own, rank=rank, world_size=num_ranks, timeout=PATIENCE)


def _take_gpu(local_rank: int, num_gpus: int) -> None:
    if local_rank >= num_gpus:
        raise ConfigError(
            f"training.num_processes: more ranks were started on this host than it has GPUs ({num_gpus}); start "
            f"{num_gpus}, one for each"
        )
    torch.cuda.set_device(local_rank)


@dataclass(frozen=True)
class Notes:
    """A folder of one launch, where ranks leave word for each other's next start and for who started them, and are told
    to stop. Every host sees it."""

    folder: Path

    def begin(self) -> bool:
        """Whether this is not the first start, asked by the first rank alone."""
        place = self.folder / "begun"
        again = place.exists()
        place.touch()
        return again

    @property
    def stop(self) -> Path:
        """A file: while it is there, ranks end after their turn, and none begins anew."""
        return self.folder / "stop"

    @property
    def _errors(self) -> list[Path]:
        return sorted(self.folder.glob("error.*"))

    @property
    def is_over(self) -> bool:
        return self.stop.exists() or bool(self._errors)

    def leave_error(self, error: KlimbError, rank: int) -> None:
        own = self.folder / f"unfinished.{rank}"
        own.write_text(str(error), encoding="utf-8")
        own.replace(self.folder / f"error.{rank}")

    def all_left_errors(self, num_ranks: int) -> bool:
        """Waits a little for the others."""
        deadline = time.monotonic() + TOGETHER
        while len(self._errors) < num_ranks and time.monotonic() < deadline:
            time.sleep(0.05)
        return len(self._errors) >= num_ranks

    def raise_error(self) -> None:
        if errors := self._errors:
            raise KlimbError(errors[0].read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Start:
    """What a rank is told by whoever started it. again: ranks were started before; stop: Notes.stop."""

    again: bool
    stop: Path


class Stopping:
    """Ctrl-C and SIGTERM in the process that started ranks: the first lets them end their turn and save, the second
    ends them at once."""

    def __init__(self, notes: Notes, end: Callable[[], None]) -> None:
        self._notes, self._end = notes, end

    @contextmanager
    def listening(self) -> Generator[None]:
        level = logging.root.manager.disable
        try:
            with handling(self):
                yield
        finally:
            logging.disable(level)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._notes.stop.exists():
            self._end()
            return
        self._notes.stop.touch()
        logging.disable(logging.CRITICAL)  # torch and Ray log every rank that ends as a failure
        os.write(2, STOPPING)


def start(work: Callable[..., T], arguments: tuple[Any, ...], num_processes: int, max_restarts: int) -> T:
    """Run work(*arguments, Start) in so many local ranks and return what the first one returned.

    A rank that dies takes the others with it, and all start again, at most max_restarts times. A KlimbError ends them
    for good and is raised here; KeyboardInterrupt where they were stopped before they could return anything.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="klimb-ranks-") as folder:
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
        results: dict[int, T] = {}
        try:
            with Stopping(notes, _kill_ranks).listening():
                results = elastic_launch(launch, _in_child)(work, arguments, notes, os.getpid())
        except ChildFailedError as error:
            notes.raise_error()
            if not notes.stop.exists():
                raise _died(error, num_processes, max_restarts) from None
        notes.raise_error()
        if results.get(0) is None and notes.stop.exists():
            raise KeyboardInterrupt
        return results[0]


def _kill_ranks() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def _in_child(work: Callable[..., T], arguments: tuple[Any, ...], notes: Notes, parent: int) -> T | None:
    """guarded, in a process of the launcher's. A terminal sends Ctrl-C to ranks too, but it is the launcher that
    decides; without it they end, where torch would wait for somebody to take their results for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, partial(_end_unless_stopping, notes.stop))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return guarded(work, arguments, notes)


def _end_unless_stopping(stop: Path, number: int, frame: FrameType | None) -> None:
    """torch ends ranks by SIGTERM when one has died. A scheduler sends it to all processes of a job: then the launcher
    has heard it too, and the turn is ended first."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        if stop.exists():
            return
        time.sleep(0.05)
    os._exit(128 + number)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def guarded(work: Callable[..., T], arguments: tuple[Any, ...], notes: Notes) -> T | None:
    """What each rank runs. A mistake of the user's is written down, and trying again would not mend it. The rank that
    found it alone must die of it nevertheless: the others may wait for it in a collective."""
    if notes.is_over:
        return None
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        return work(*arguments, Start(again=rank == 0 and notes.begin(), stop=notes.stop))
    except KlimbError as error:
        notes.leave_error(error, rank)
        if notes.all_left_errors(num_ranks):
            return None
        raise


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
