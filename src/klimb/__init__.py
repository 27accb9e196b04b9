"""klimb: PPO and its relatives for language models, with the KL kept where it was put.

The public names load on first use, so that `import klimb` costs nothing before torch is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klimb.version import VERSION as __version__

if TYPE_CHECKING:
    from klimb.comparison.compare import compare
    from klimb.comparison.side_by_side import Comparison
    from klimb.config.schema import RunConfig
    from klimb.doctor.finding import Finding
    from klimb.launch import RunResult, evaluate, train
    from klimb.readers.diagnose import diagnose

__all__ = [
    "Comparison",
    "Finding",
    "RunConfig",
    "RunResult",
    "__version__",
    "compare",
    "diagnose",
    "evaluate",
    "train",
]

_HOMES = {
    "RunConfig": "klimb.config.schema",
    "RunResult": "klimb.launch",
    "train": "klimb.launch",
    "evaluate": "klimb.launch",
    "compare": "klimb.comparison.compare",
    "Comparison": "klimb.comparison.side_by_side",
    "diagnose": "klimb.readers.diagnose",
    "Finding": "klimb.doctor.finding",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'klimb' has no attribute '{name}'; public names: {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
