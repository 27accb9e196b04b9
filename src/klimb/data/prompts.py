"""Rows become prompts under a length limit, and prompts become an endless stream that can be resumed.

The order of an epoch is a function of (seed, epoch) alone, so a stream restored from its state goes on exactly
as the one that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from klimb.data.chat import encode_prompt, readable, start_ids
from klimb.data.rows import DataSettings, RawRow
from klimb.errors import CheckpointError, ConfigError, DataError
from klimb.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PromptCounts:
    """What the limit did to the rows. longest: tokens of the longest prompt kept, after truncation."""

    rows: int
    kept: int
    dropped: int
    truncated: int
    longest: int


def build_prompts(
    rows: Sequence[RawRow], tokenizer: PreTrainedTokenizerBase, settings: DataSettings
) -> tuple[tuple[Prompt, ...], PromptCounts]:
    """Tokenise all rows and apply `max_prompt_tokens` with the policy `overlong`.

    Prompt.row is the position in `rows`; dropped rows leave a gap. `truncate_left` keeps the last tokens, so the
    start token and the head of a chat template go; `truncate_right` keeps the first, so the mark that hands the
    turn to the model goes. For chat prompts both break the template: prefer `drop`, or a higher limit.
    Raises DataError: a row that cannot be encoded, a row over the limit under `error`, nothing left.
    """
    limit = settings.max_prompt_tokens
    prompts: list[Prompt] = []
    overlong: list[tuple[int, RawRow, int]] = []
    start = start_ids(tokenizer)
    for row, raw in enumerate(rows):
        try:
            ids = encode_prompt(tokenizer, raw.prompt, settings.system_prompt, start)
        except DataError as error:
            raise DataError(f"{raw.source}, row {raw.index}: {error}") from error
        if len(ids) > limit:
            overlong.append((row, raw, len(ids)))
            if settings.overlong in ("error", "drop"):
                continue
            ids = ids[-limit:] if settings.overlong == "truncate_left" else ids[:limit]
        prompts.append(
            Prompt(
                row=row,
                text=readable(raw.prompt),
                token_ids=ids,
                answer=raw.answer,
                source=raw.source,
                extra=raw.extra,
            )
        )
    if overlong:
        _report_overlong(overlong, len(rows), settings)
    if not prompts:
        raise DataError(
            f"no prompt is left of {len(rows)} rows: all are over data.max_prompt_tokens = {limit}. Raise it."
            if overlong
            else "there are no rows to make prompts of. Give data files that hold some."
        )
    truncated = len(overlong) - (len(rows) - len(prompts))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    counts = PromptCounts(
        rows=len(rows),
        kept=len(prompts),
        dropped=len(rows) - len(prompts),
        truncated=truncated,
        longest=longest,
    )
    return tuple(prompts), counts


def _report_overlong(overlong: Sequence[tuple[int, RawRow, int]], num_rows: int, settings: DataSettings) -> None:
    limit = settings.max_prompt_tokens
    longest = max(length for _, _, length in overlong)
    if settings.overlong == "error":
        _, raw, length = overlong[0]
        raise DataError(
            f"{raw.source}, row {raw.index}: the prompt has {length} tokens, data.max_prompt_tokens is {limit} "
            f"({len(overlong)} of {num_rows} rows are over it, the longest has {longest}). Raise the limit, or set "
            "data.overlong_prompts to drop, truncate_left or truncate_right."
        )
    done = "dropped" if settings.overlong == "drop" else "cut " + settings.overlong.replace("truncate_", "at the ")
    logger.warning(
        "%d of %d %s: prompts over data.max_prompt_tokens = %d (longest %d)",
        len(overlong),
        num_rows,
        done,
        limit,
        longest,
    )


def check_context(longest_prompt: int, max_tokens: int, context_limit: int | None) -> None:
    """Refuse (ConfigError) prompts and responses that together exceed what the model can read.

    longest_prompt, max_tokens, context_limit: in tokens; a limit of None means that the model names none.
    """
    if context_limit is not None and longest_prompt + max_tokens > context_limit:
        raise ConfigError(
            f"the longest prompt ({longest_prompt} tokens) and actor_rollout_ref.max_tokens ({max_tokens}) make "
            f"{longest_prompt + max_tokens} tokens, but the model reads at most {context_limit} "
            f"({longest_prompt} + {max_tokens} > {context_limit}). Lower actor_rollout_ref.max_tokens, or "
            "data.max_prompt_tokens with data.overlong_prompts: drop."
        )


class PromptStream:
    """The prompts of a data set, epoch after epoch, without end."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        """seed: 0 or more. shuffle: a new order in every epoch; else file order. DataError without prompts."""
        if not prompts:
            raise DataError("there are no prompts to draw from. Give data files that hold some.")
        assert seed >= 0, "config must refuse a negative seed"
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint(self._prompts)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every prompt of the data set."""
        return tuple(len(prompt.token_ids) for prompt in self._prompts)

    @property
    def epoch(self) -> float:
        """Passes over the data so far: 1.5 is half way through the second."""
        return self._epoch + self._position / len(self._prompts)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, across the end of an epoch where it falls. Each epoch has every prompt once."""
        assert n >= 0
        taken: list[Prompt] = []
        while len(taken) < n:
            rows = self._order[self._position : self._position + n - len(taken)]
            taken.extend(self._prompts[row] for row in rows)
            self._position += len(rows)
            if self._position == len(self._prompts):
                # At once, not at the next call: a state saved here already points at the next epoch.
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain JSON values, with what identifies its data and order."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the stream that wrote `state` stood.

        Raises CheckpointError when the state is damaged or belongs to other prompts, or to another order of them:
        a position in one order means nothing in another.
        """
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise CheckpointError(
                    f"the checkpoint's data position was saved with {name} = {state.get(name)!r}, this run has "
                    f"{here!r}: {_DIFFERENCE[name]} Resume with the data and seed of the first run, or start a "
                    "new run with training.resume=never."
                )
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < len(self):
            raise CheckpointError(
                f"the checkpoint's data position is damaged: epoch {epoch!r}, position {position!r} of "
                f"{len(self)} prompts. Resume from another checkpoint."
            )
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._prompts)))
        # Sorting raw words: numpy promises the stream of a bit generator for ever, not that of permutation().
        keys = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(len(self._prompts))
        return [int(row) for row in np.argsort(keys, kind="stable")]


_DIFFERENCE = {
    "num_prompts": "the data files have gained or lost rows.",
    "fingerprint": "the prompts' tokens or answers have changed.",
    "seed": "the order of the prompts is another.",
    "shuffle": "the order of the prompts is another.",
}


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """sha256 of the rows, tokens and answers; the files' paths and other columns do not count."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.row, prompt.token_ids, prompt.answer]).encode())
        digest.update(b"\n")
    return digest.hexdigest()
