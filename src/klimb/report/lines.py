"""jsonl files as they are found: whole, cut off in the middle of a line, or damaged somewhere."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEPT = 5000
"""Samples a report holds at most."""
TEXT = 12_000_000
"""Characters of prompts and responses a report holds at most; beyond it the longest are cut."""
EXTREMES = 100
"""Samples of the highest and of the lowest reward that are always kept."""
LARGEST = 2**52
NOT_FINITE = ("nan", "inf", "-inf")


@dataclass
class Lines:
    """Reads one file; afterwards `notes` says what could not be read."""

    path: Path
    damaged: int = 0
    cut: bool = False
    first: int = 0
    notes: list[str] = field(default_factory=list[str])

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Byte offset and object of every line that is one; a missing file has none."""
        offset = number = 0
        if self.path.is_file():
            with self.path.open("rb") as file:
                for line in file:
                    number += 1
                    found = _object(line)
                    if found is not None:
                        yield offset, found
                    elif not line.endswith(b"\n"):
                        self.cut = True
                    elif line.strip():
                        self.refuse(number)
                    offset += len(line)
        self._conclude()

    def refuse(self, number: int = 0) -> None:
        self.damaged += 1
        self.first = self.first or number

    def _conclude(self) -> None:
        if self.damaged:
            where = f", the first is line {self.first}" if self.first else ""
            lines = "1 line is" if self.damaged == 1 else f"{self.damaged} lines are"
            self.notes.append(f"{self.path.name}: {lines} not readable and left out{where}")
        if self.cut:
            self.notes.append(f"{self.path.name}: the last line is cut off and was left out")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # also half a UTF-8 character
        return None
    return found if isinstance(found, dict) else None


def number(value: Any) -> float | None:
    """A number of the log; one that is not finite is written there as its name."""
    if isinstance(value, str):
        return float(value) if value in NOT_FINITE else None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def whole(value: Any) -> int | None:
    """A step or another count, small enough that every one of them is a float."""
    found = number(value)
    return int(found) if found is not None and abs(found) <= LARGEST and found == int(found) else None


def read_samples(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The samples a report shows, in the file's order, and notes.

    The file is walked twice so that only offsets are held of the samples that are not kept.
    """
    lines = Lines(path)
    offsets, steps, rows, rewards, evals = array("q"), array("q"), array("q"), array("d"), bytearray()
    for offset, sample in lines.objects():
        step = whole(sample.get("step"))
        if step is None or "response" not in sample:
            lines.damaged += 1
            continue
        offsets.append(offset)
        steps.append(step)
        rows.append(whole(sample.get("row")) or 0)
        reward = number(sample.get("reward"))
        rewards.append(math.nan if reward is None else reward)
        evals.append(sample.get("kind") == "eval")
    kept = choose(rows, rewards, evals)
    notes = list(lines.notes)
    if len(kept) < len(offsets):
        notes.append(f"{path.name}: {len(kept):,} of {len(offsets):,} samples are shown, spread over the run")
    samples = list(_read_at(path, [offsets[i] for i in kept]))
    return _within_budget(samples, notes, path.name), notes


def choose(rows: Sequence[int], rewards: Sequence[float], evals: Sequence[int], limit: int = KEPT) -> list[int]:
    """Which samples to keep: held-out prompts with all their answers, extreme rewards, the rest spread evenly."""
    if len(rows) <= limit:
        return list(range(len(rows)))
    kept: set[int] = set()
    histories: dict[int, list[int]] = {}
    train: list[int] = []
    for i in range(len(rows)):
        if evals[i]:
            histories.setdefault(rows[i], []).append(i)
        else:
            train.append(i)
    room = limit // 2 if train else limit
    for history in histories.values():
        if len(kept) + len(history) <= room:
            kept.update(history)
    if not kept and histories:
        kept.update(spread(next(iter(histories.values())), room))
    ranked = sorted((i for i in train if math.isfinite(rewards[i])), key=lambda i: rewards[i])
    extremes = min(EXTREMES, limit // 8)
    kept.update(ranked[:extremes], ranked[-extremes:])
    kept.update(spread([i for i in train if i not in kept], limit - len(kept)))
    return sorted(kept)


def spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of them at equal distances, first and last included."""
    if count >= len(items):
        return list(items)
    if count < 2:
        return list(items[-count:]) if count > 0 else []
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _read_at(path: Path, offsets: Sequence[int]) -> Iterator[dict[str, Any]]:
    if not offsets:
        return
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            found = _object(file.readline())
            if found is not None:  # a run that resumes may cut the file between the two walks
                yield _sample(found)


def _sample(found: dict[str, Any]) -> dict[str, Any]:
    """One sample with every field of its type, whatever the line held."""
    parts = found.get("parts")
    return {
        "step": whole(found.get("step")) or 0,
        "kind": "eval" if found.get("kind") == "eval" else "train",
        "row": whole(found.get("row")) or 0,
        "index": whole(found.get("index")) or 0,
        "prompt": str(found.get("prompt", "")),
        "response": str(found.get("response", "")),
        "answer": None if found.get("answer") is None else str(found["answer"]),
        "reward": number(found.get("reward")),
        "parts": {str(k): number(v) for k, v in parts.items()} if isinstance(parts, dict) else {},
        "correct": found["correct"] if isinstance(found.get("correct"), bool) else None,
        "failure": None if found.get("failure") is None else str(found["failure"]),
        "finish_reason": str(found.get("finish_reason") or ""),
        "num_tokens": whole(found.get("num_tokens")) or 0,
    }


def _within_budget(samples: list[dict[str, Any]], notes: list[str], name: str) -> list[dict[str, Any]]:
    lengths = sorted(len(s[key]) for s in samples for key in ("prompt", "response"))
    left, cap = TEXT, None
    for i, length in enumerate(lengths):
        if length * (len(lengths) - i) > left:
            cap = left // (len(lengths) - i)
            break
        left -= length
    if cap is None:
        return samples
    notes.append(f"{name}: prompts and responses longer than {cap:,} characters are cut in the report")
    return [s | {key: _cut(s[key], cap) for key in ("prompt", "response")} for s in samples]


def _cut(text: str, cap: int) -> str:
    return text if len(text) <= cap else f"{text[:cap]} [... {len(text) - cap:,} more characters]"
