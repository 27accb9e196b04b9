"""The same ranks on the machines of a Ray cluster: Ray Train places them, and starts them again when one is lost.

Nothing of the training is known here, and nothing of Ray elsewhere. The run folder must be one place for all hosts.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar, cast

import torch

from klimb.config.paths import make_folder
from klimb.config.scale import ClusterConfig
from klimb.errors import ConfigError, KlimbError, MissingExtra
from klimb.processes import Notes, Stopping, backend, guarded

T = TypeVar("T")
PATIENCE = 10.0
"""Seconds that the head of a cluster has for answering."""


def run_on_ray(
    work: Callable[..., T], arguments: tuple[Any, ...], num_workers: int, cluster: ClusterConfig, folder: Path
) -> T:
    """Run work(*arguments, Start) in so many workers and return what the first one returned.

    folder: of the run, where all workers can write. A worker or host that is lost takes the others with it; all start
    again as soon as there is room for them, at most cluster.max_restarts times. A KlimbError ends them for good.
    """
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        raise MissingExtra("ray", "ray", "cluster.kind=ray") from None
    own = not ray.is_initialized()
    if own:
        _connect(ray, cluster)
    resources = _resources(ray.cluster_resources(), num_workers)
    make_folder(folder)
    notes, mailbox = Notes(Path(mkdtemp(prefix=".ray-", dir=folder)).resolve()), _mailbox(ray)
    trainer = TorchTrainer(
        _on_worker,
        train_loop_config={
            "work": work,
            "arguments": arguments,
            "notes": notes.folder,
            "place": os.getcwd(),
            "mailbox": mailbox,
        },
        scaling_config=ScalingConfig(
            num_workers=num_workers, use_gpu="GPU" in resources, resources_per_worker=resources
        ),
        torch_config=TorchConfig(backend=backend("GPU" in resources)),
        run_config=RunConfig(
            name="train",
            storage_path=str(notes.folder),
            failure_config=FailureConfig(max_failures=cluster.max_restarts),
        ),
    )
    try:
        with Stopping(notes, _interrupt).listening():
            _beside(trainer.fit)
    except Exception as error:
        notes.raise_error()
        raise KlimbError(
            f"a worker was lost more often than cluster.max_restarts ({cluster.max_restarts}) allows, or died by a "
            f"mistake of klimb's: {error}. The same command goes on from the newest checkpoint"
        ) from error
    else:
        notes.raise_error()
        result: Any = ray.get(mailbox.take.remote())
        if result is None and notes.stop.exists():
            raise KeyboardInterrupt
        return cast(T, result)
    finally:
        if own:
            ray.shutdown()
        shutil.rmtree(notes.folder, ignore_errors=True)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _beside(work: Callable[[], object]) -> None:
    """In a thread: in the main one Ray would take Ctrl-C for itself, and lose what was not saved."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=1)
    if failed:
        raise failed[0]


class Mailbox:
    """Where the first rank leaves its result: Ray Train hands on nothing but what came with a checkpoint of its own."""

    def __init__(self) -> None:
        self._content: Any = None

    def leave(self, content: Any) -> None:
        self._content = content

    def take(self) -> Any:
        return self._content


def _mailbox(ray: Any) -> Any:
    """On the host where the command was typed: any other may be lost."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()


def _connect(ray: Any, cluster: ClusterConfig) -> None:
    try:
        _knock(cluster.address)
        ray.init(address=cluster.address or "local", logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cluster.address is {cluster.address}, where no Ray cluster answers: {str(error).splitlines()[0]}. Start "
            "one by `ray start --head`, or leave the key out for one on this machine alone"
        ) from None


def _knock(address: str | None) -> None:
    """OSError at once where nobody listens: Ray itself asks again for many minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


def _resources(there: Mapping[str, float], num_workers: int) -> dict[str, float]:
    """Of each worker. ConfigError when the cluster can never have room for all of them."""
    wanted = {"CPU": 1.0, **({"GPU": 1.0} if there.get("GPU", 0) > 0 else {})}
    for name, each in wanted.items():
        if there.get(name, 0) < each * num_workers:
            raise ConfigError(
                f"cluster.num_workers is {num_workers}, which needs {each * num_workers:g} {name}, but the cluster has "
                f"{there.get(name, 0):g}; start fewer workers, or add a host by `ray start`"
            )
    return wanted


def _on_worker(given: dict[str, Any]) -> None:
    place = Path(given["place"])
    if place.is_dir():
        os.chdir(place)  # paths in the config are relative to where the command was typed
    if torch.cuda.is_available():
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())
    result = guarded(given["work"], given["arguments"], Notes(Path(given["notes"])))
    if os.environ["RANK"] == "0":
        import ray

        ray.get(given["mailbox"].leave.remote(result))
