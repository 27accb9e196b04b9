"""What `klimb train` prints before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from klimb.cli.plan import check_tasks, explain, open_console, show_advice, show_arithmetic
from klimb.config.load import Loaded
from klimb.config.paths import check_runnable
from klimb.config.posture import resolve
from klimb.config.schema import RunConfig
from klimb.console import plain
from klimb.estimate.show import beside_lines

if TYPE_CHECKING:
    from klimb.launch import RunResult
    from klimb.outlook import Outlook

NAMES = {"eval/reward": "held-out reward", "eval/accuracy": "held-out accuracy", "eval/pass_at_k": "held-out pass@k"}


def show_start(loaded: Loaded) -> None:
    """Refuse what cannot run, then the arithmetic and the advice, before anything heavy is imported."""
    check_runnable(loaded.config)
    check_tasks(loaded.config)
    console, posture = open_console(), resolve(loaded.config)
    show_arithmetic(console, loaded.config, posture)
    console.print(Text(f"\nposture: {explain(loaded.config, posture)}"), soft_wrap=True)
    show_advice(console, loaded.config, posture)
    console.print()


def show_outlook(console: Console, outlook: Outlook) -> None:
    """Peaks and seconds of a step as measured, beside what `klimb plan` would have said of these lengths."""
    peaks, seconds = outlook.forecast.peaks, outlook.forecast.seconds
    console.print(Text("memory and time of a step, measured beside estimated (docs/plan.md):"), soft_wrap=True)
    for line in beside_lines(outlook.peaks, peaks, outlook.seconds, seconds):
        console.print(Text(f"  {line}"), soft_wrap=True)


def show_summary(result: RunResult, config: RunConfig) -> None:
    """Before and after on held-out prompts, the KL of the second half, the folder; the last line is one to grep."""
    console = open_console()
    table = Table("", "before", "after", "change", box=None, pad_edge=False)
    for key, name in NAMES.items():
        if key in result.before and key in result.after:
            before, after = result.before[key], result.after[key]
            share = key != "eval/reward"
            form = ".1%" if share else ".3f"
            change = f"{100 * (after - before):+.1f} points" if share else f"{after - before:+.3f}"
            table.add_row(name, format(before, form), format(after, form), change)
    console.print()
    if table.row_count:
        console.print(table)
    if result.kl is not None:
        posture = resolve(config)
        target = f", target {config.algorithm.kl_ctrl.target_kl:g}" if posture.kl_type != "fixed" else ""
        console.print(Text(f"mean KL of the second half: {result.kl:.4f} nats per token{target}"))
    if result.outlook is not None:
        show_outlook(console, result.outlook)
    if result.best is not None:
        console.print(Text(f"best checkpoint by {config.eval.metric}: {result.best}"), soft_wrap=True)
    for intervention in result.interventions:
        console.print(
            Text(
                plain(
                    f"intervention {intervention.number}: {intervention.finding} at step "
                    f"{intervention.step}, back to step {intervention.back_to}, {' '.join(intervention.overrides)}"
                )
            ),
            soft_wrap=True,
        )
    if not result.finished and result.alarms:
        named = ", ".join(sorted({alarm.code for alarm in result.alarms}))
        console.print(Text(f"ended at step {result.step} by an alarm: {named}"))
    elif not result.finished:
        console.print(Text(f"stopped at step {result.step}; the same command goes on from there"))
    before, after = result.before.get("eval/accuracy"), result.after.get("eval/accuracy")
    verdict = "" if before is None or after is None else f"held-out accuracy {before:.1%} -> {after:.1%}, "
    console.print(
        Text(f"{'done' if result.finished else 'stopped'}: {verdict}run folder {result.folder}"), soft_wrap=True
    )
