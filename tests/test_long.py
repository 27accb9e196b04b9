"""Rows of 8,192 tokens through the passes and the update, and what is kept of the larger measurement.

That a cut by tokens changes no gradient is tested in test_update.py; the head's and the body's own memory in
models/test_memory.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "benchmarks" / "long"
KEPT = BENCH / "measured.json"
DOCS = ROOT / "docs" / "long-context.md"


def bench(*words: str) -> str:
    """The output of one of the bench's programs, with large tensors in mappings of their own, as in measure.py."""
    done = subprocess.run(
        [sys.executable, str(BENCH / words[0]), *words[1:]],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("long"))
    bench("cases.py", folder)
    return folder


def phase(inputs: str, tokens: int, *words: str) -> dict[str, Any]:
    return json.loads(bench("one.py", inputs, str(tokens), *words, "--size", "tiny"))


def above(row: dict[str, Any], part: str) -> int:
    return row["peak_bytes"][part] - row["before_bytes"]


@pytest.mark.slow
def test_a_phase_with_a_row_of_8192_tokens_takes_at_most_twice_the_memory_of_4096(inputs: str) -> None:
    """Prompts of 32 and 4,096 tokens, answers of 128 to 8,160; the program ends with an error on a number that is not
    finite or a step that is skipped."""
    short, long = (phase(inputs, tokens, "explicit", "--checkpointing") for tokens in (4096, 8192))
    assert max(long["tokens"]) == 8192
    for part in ("score", "update"):
        assert above(long, part) < 2.2 * above(short, part)  # measured by pages of the process: a few percent off
    plain = phase(inputs, 8192, "explicit")
    assert above(long, "update") < 0.6 * above(plain, "update")
    assert long["grad_norm"] == plain["grad_norm"]  # recomputed to the last bit


@pytest.mark.slow
def test_the_cached_posture_makes_no_pass_of_the_policy_over_long_rows(inputs: str) -> None:
    explicit, cached = (phase(inputs, 2048, posture) for posture in ("explicit", "cached"))
    assert explicit["old_forwards"] == explicit["forwards"] > 0
    assert cached["old_forwards"] == 0


def test_the_kept_measurement_is_linear_and_the_docs_show_it() -> None:
    """table.py ends with an error when a peak with checkpointing grows faster than the tokens."""
    table = bench("table.py").strip()
    assert "at most linear" in table
    assert table in DOCS.read_text(encoding="utf-8")
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    for tokens in (2048, 4096, 8192):
        for posture in ("explicit", "cached"):
            for recompute in ("", "-recompute"):
                assert max(kept[f"grpo-{posture}-{tokens}{recompute}"]["tokens"]) == tokens
