"""Built-in tasks: prompts, a held-out split and a verifier. No torch, no transformers."""

from klimb.tasks.base import Split, Task, TaskRow, TaughtTask, Verdict
from klimb.tasks.table import load_task

__all__ = ["Split", "Task", "TaskRow", "TaughtTask", "Verdict", "load_task"]
