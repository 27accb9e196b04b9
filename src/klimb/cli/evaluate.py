"""`klimb eval`: a run folder's checkpoint, or the model of a config, on held-out prompts."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from klimb.cli.plan import open_console
from klimb.config.load import load_config
from klimb.config.paths import NO_EVAL, missing_model
from klimb.errors import ConfigError


def run_and_show(
    target: Path, overrides: tuple[str, ...], checkpoint: str | None, model: Path | None, samples: Path | None
) -> None:
    """Evaluate and print a table; `samples` gets every answer as jsonl."""
    if target.is_dir():
        if not (target / "config.yaml").is_file():
            raise ConfigError(f"{target}: no config.yaml there; give a run folder or a config file")
        config = load_config(target / "config.yaml", overrides).config
        if model is None:
            from klimb.export import find_checkpoint

            model = find_checkpoint(target, checkpoint or "last") / "actor"
    else:
        if checkpoint is not None:
            raise ConfigError("--checkpoint goes with a run folder; with a config file give --model")
        config = load_config(target, overrides).config
    if model is not None and (text := missing_model("--model", str(model))) is not None:
        raise ConfigError(text)
    if not config.data.eval_files:
        raise ConfigError(NO_EVAL)
    if samples is not None:
        _check_target(samples)
    from klimb.launch import evaluate
    from klimb.runlog import json_line, sample_row

    result = evaluate(config, model)
    console = open_console()
    table = Table("metric", "value", box=None, pad_edge=False)
    for name, value in result.metrics.items():
        table.add_row(Text(name), Text(f"{value:.4f}", justify="right"))
    console.print(table)
    answers = len(result.scored)
    console.print(Text(f"{answers} answers of {model or config.actor_rollout_ref.model_path}"), soft_wrap=True)
    if samples is not None:
        samples.write_text("".join(json_line(sample_row(0, s, "eval")) for s in result.scored), encoding="utf-8")
        console.print(Text(f"wrote {samples}"), soft_wrap=True)


def _check_target(path: Path) -> None:
    """Before minutes of work: the answers must have a place."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--samples {path}: cannot be written ({error.strerror}); name another file") from error
