"""klimb beside its peers on this machine, alternating, each in a process and environment of its own; one table.

python benchmarks/speed/bench.py [--rounds 3] [--repeats 1] [--only rollout update step posture]

Every line that a benchmark prints is kept in runs/speed.jsonl. A peer whose environment cannot be made is left out and
said so. `make bench` runs it all: about an hour on two cores, during which the machine must do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEEDS = 7


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One process. env: whose Python runs it."""

    script: str
    args: tuple[str, ...]
    env: str = "klimb"


def arms(only: list[str], repeats: int) -> list[Arm]:
    often = ("--repeats", str(repeats))
    # Every engine draws lengths of its own, and the longest rows set the time: one phase of them says little.
    seeds = ("--repeats", str(max(repeats, SEEDS)))
    rollouts = [
        Arm(
            script="rollout",
            args=(engine, kind, *(seeds if kind == "varied" else often)),
            env="vllm" if engine == "vllm" else "klimb",
        )
        for kind in ("fixed", "varied", "groups")
        for engine in ("klimb", "generate", "vllm")
    ]
    updates = [
        Arm(script="update", args=(engine, kind, *often))
        for kind in ("fixed", "varied")
        for engine in ("klimb", "plain")
    ]
    steps = [
        Arm(script="step", args=("klimb", "grpo", "--steps", str(repeats + 1))),
        Arm(script="step", args=("trl", "grpo", "--steps", str(repeats)), env="trl-grpo"),
        Arm(script="step", args=("klimb", "ppo", "--steps", str(repeats + 1))),
        Arm(script="step", args=("trl", "ppo", "--steps", str(repeats)), env="trl-ppo"),
    ]
    postures = [
        Arm(
            script="step", args=("klimb", kind, "--posture", posture, "--minibatches", "4", "--steps", str(repeats + 1))
        )
        for kind in ("grpo", "ppo")
        for posture in ("explicit", "cached")
    ]
    chosen = {"rollout": rollouts, "update": updates, "step": steps, "posture": postures}
    return [arm for name in only or chosen for arm in chosen[name]]


def python_of(env: str, folder: Path) -> Path | None:
    """The environment's Python, made from its requirements file when it is not there; None when that fails."""
    if env == "klimb":
        return Path(sys.executable)
    home = folder / env
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        wanted = HERE / f"requirements-{env}.txt"
        done = subprocess.run([str(python), "-m", "pip", "install", "-q", "-r", str(wanted)], check=False)
        if done.returncode != 0:
            print(f"{env}: {wanted} cannot be installed here; its rows are left out", file=sys.stderr)
            return None
        # vllm's requirements bring vision and audio parts for another torch, which break the import of transformers.
        subprocess.run(
            [str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=False
        )
        (home / "ready").touch()
    return python


def run(arm: Arm, python: Path, threads: int) -> dict[str, Any] | None:
    """The JSON line of one process."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [str(python), str(HERE / f"{arm.script}.py"), *arm.args, "--threads", str(threads)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if done.returncode != 0 or not lines:
        print(f"failed: {' '.join(command)}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """A row per name, medians over the lines that are not void; the ratio is to the first row of the same kind."""
    yield "| work | library | tokens/s | spread | runs (void) | klimb is | share of floor | peak MiB |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    names = list(dict.fromkeys(line["name"] for line in lines))
    first: dict[str, float] = {}
    for name in names:
        mine = [line for line in lines if line["name"] == name]
        rates = [line["tokens_per_s"] for line in mine if line["tokens_per_s"] is not None]
        work, _, library = name.rpartition("/")
        if not rates:
            yield f"| {work} | {library} | void | | 0 ({len(mine)}) | | | |"
            continue
        rate = statistics.median(rates)
        ratio = f"{first[work] / rate:.2f} x" if work in first else ""
        first.setdefault(work, rate)
        shares = [line["floor_share"] for line in mine if "floor_share" in line]
        shares += [line["perf/floor_share"] for line in mine if "perf/floor_share" in line]
        share = f"{statistics.median(shares):.0%}" if shares else ""
        peak = statistics.median(line.get("resident_mib", line["peak_mib"]) for line in mine)
        void = sum(line["void"] for line in mine)
        yield (
            f"| {work} | {library} | {rate:,.0f} | {min(rates):,.0f} to {max(rates):,.0f} | {len(rates)} ({void}) "
            f"| {ratio} | {share} | {peak:,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="timings of one process")
    parser.add_argument("--only", nargs="*", choices=("rollout", "update", "step", "posture"), default=[])
    parser.add_argument("--envs", type=Path, default=Path("runs/bench-envs"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/speed.jsonl"))
    args = parser.parse_args()
    wanted = arms(args.only, args.repeats)
    pythons = {env: python_of(env, args.envs.resolve()) for env in {arm.env for arm in wanted}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = list[dict[str, Any]]()
    for number in range(args.rounds):
        for arm in wanted:
            python = pythons[arm.env]
            line = None if python is None else run(arm, python, args.threads)
            if line is not None:
                lines.append(line)
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                rate = line["tokens_per_s"]
                print(f"round {number + 1}: {line['name']}: {f'{rate:,.0f} tokens/s' if rate else 'void'}", flush=True)
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
