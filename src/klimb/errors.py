"""Every error a user can cause. Each message says what was found, what is allowed and what to do.

    KlimbError
      ConfigError      a key, a value or a combination in the YAML or an override
      DataError        a data file, a row, a prompt that does not fit
      ModelError       a model folder that cannot play its role
      RewardError      a reward that cannot be loaded, or that failed too often
      CheckpointError  a checkpoint that is damaged or belongs to another kind of run
      MissingExtra     an optional package is needed; the message names the install command

The command line prints the message of a `KlimbError` without a traceback and exits with 2. Anything
else that escapes is a defect of klimb and exits with 1.
"""

from __future__ import annotations


class KlimbError(Exception):
    """The user's to mend. The text is the whole message: no traceback is shown with it."""


class ConfigError(KlimbError):
    """A config file or an override asks for something that does not exist or cannot work."""


class DataError(KlimbError):
    """A data file is missing, damaged, or does not hold what the config says it holds."""


class ModelError(KlimbError):
    """A model folder is missing, damaged or unfit for its role."""


class RewardError(KlimbError):
    """A reward cannot be loaded, or more episodes failed than `max_failed_fraction` allows."""


class CheckpointError(KlimbError):
    """A checkpoint is incomplete, damaged, or belongs to a run of another kind."""


class MissingExtra(KlimbError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        self._given = (package, extra, needed_for)
        super().__init__(
            f"{needed_for} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'klimb[{extra}]'"
        )

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        """Else pickle would make it again from its text alone, and fail: it comes from other processes too."""
        return type(self), self._given
