"""Run the cases whose names come on standard input, one after the other, in this process."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import Case, case_named
from rich.console import Console
from torch import Tensor

from klimb import launch
from klimb.config.schema import RunConfig
from klimb.console import Screen
from klimb.errors import KlimbError
from klimb.rollout.base import Request, Sampling
from klimb.run import Run
from klimb.types import Sample


class OffEngine:
    """The real engine, whose recorded log-probs are off, or which samples at another temperature than it is told."""

    def __init__(self, engine: Any, bias: float, temperature: float | None) -> None:
        self._engine, self._bias, self._temperature = engine, bias, temperature

    def load_weights(self, named_tensors: Any, version: int) -> None:
        self._engine.load_weights(named_tensors, version)

    def generate(self, requests: Sequence[Request], sampling: Sampling, progress: Any = None) -> list[Sample]:
        if self._temperature is not None and sampling.temperature > 0:
            sampling = replace(sampling, temperature=self._temperature)
        samples = self._engine.generate(requests, sampling, progress)
        return [self._biased(s) for s in samples]

    def close(self) -> None:
        self._engine.close()

    def _biased(self, sample: Sample) -> Sample:
        shifted = tuple(min(0.0, x + self._bias) if m else x for x, m in zip(sample.logprobs, sample.mask, strict=True))
        return replace(sample, logprobs=shifted)


def sabotaged(build: Callable[..., Run], case: Case) -> Callable[..., Run]:
    def build_off(*args: Any) -> Run:
        run = build(*args)
        if case.bias or case.rollout_temperature is not None:
            run = replace(run, sampler=OffEngine(run.sampler, case.bias, case.rollout_temperature))
        if case.nan_from is not None:
            steps, actor = run.counts.steps_per_phase, run.actor
            first = next(p for p in actor.module.parameters() if p.requires_grad)

            def spoil(gradient: Tensor) -> Tensor:
                return gradient * math.nan if actor.steps >= steps * (case.nan_from or 0) else gradient

            first.register_hook(spoil)
        return run

    return build_off


def confine(size: int) -> None:
    """This process, from now on, in a control group that may use so many bytes."""
    group = Path("/sys/fs/cgroup/memory/klimb-bench")
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(size))
    (group / "cgroup.procs").write_text("0")


def run(case: Case, root: Path) -> None:
    place = root / case.run_name
    if case.memory is not None:
        confine(case.memory)
    for name, text in case.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    episodes = 32 if "actor_rollout_ref.rollout_batch_size=32" in case.overrides else 24
    overrides = [o.replace("FILES", str(place)) for o in case.overrides]
    if case.reference:
        overrides.append(f"actor_rollout_ref.ref_model_path={root / 'other_model'}")
    overrides += [
        f"training.seed={case.seed}",
        f"training.total_episodes={episodes * case.steps}",
        f"run.dir={root}",
        f"run.name={case.run_name}",
    ]
    overrides = [o for o in overrides if not o.startswith("training.resume")] + ["training.resume=auto"]
    build = launch.build_run
    launch.build_run = sabotaged(build, case)
    log = io.StringIO()
    try:
        done = launch.train(RunConfig.load(case.recipe, overrides), "doctor", Screen(Console(file=log), live=False))
        end = "finished" if done.finished else ""  # somebody stopped it: it goes on with the next call
    except KlimbError as error:
        end = f"stopped: {error}"
    finally:
        launch.build_run = build
    if end:
        (place / "end.txt").write_text(f"{end}\n")


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = case_named(line.strip())
        try:
            run(case, root)
            print(case.run_name, "done", flush=True)
        except Exception as error:  # the next case is to run whatever happened to this one
            print(case.run_name, f"FAILED {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
