"""A reward behind an HTTP endpoint.

Request: POST, JSON {"prompts": [...], "responses": [...], "answers": [...]}, equally long lists, text (answers
may hold null). Reply: status 200, JSON {"rewards": [...]}, as many numbers; null abstains for that row.
A call that goes wrong in any other way is a failure of all its rows. Redirects are not followed: the texts go
where the config says and nowhere else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import httpx

from klimb.reward.base import ABSTAINED, Failure, Outcome, failed, valued
from klimb.reward.worker_side import describe

if TYPE_CHECKING:
    from klimb.types import Sample

# A reply is a list of numbers; more than this is a fault or an attack.
MAX_REPLY_BYTES = 16 * 2**20


class HttpReward:
    """Scores chunks of batch_size rows, one call after the other, timeout_seconds each, all in all.

    One more try follows a connection error (a server that restarted, a kept connection that was closed), none
    follows a timeout or a bad reply.
    """

    verifies = False

    def __init__(self, url: str, *, name: str, weight: float, batch_size: int, timeout_seconds: float) -> None:
        self.name = name
        self.weight = weight
        self._url = url
        self._batch_size = batch_size
        self._timeout = timeout_seconds
        self._client = httpx.Client(timeout=timeout_seconds, follow_redirects=False)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for start in range(0, len(samples), self._batch_size):
            chunk = samples[start : start + self._batch_size]
            got = self._ask(chunk)
            outcomes += [Outcome(failure=got)] * len(chunk) if isinstance(got, Failure) else got
        return outcomes

    def _ask(self, samples: Sequence[Sample]) -> list[Outcome] | Failure:
        body = {
            "prompts": [sample.prompt.text for sample in samples],
            "responses": [sample.text for sample in samples],
            "answers": [sample.prompt.answer for sample in samples],
        }
        deadline = time.monotonic() + self._timeout
        for attempt in range(2):
            try:
                return _read(self._post(body, deadline), len(samples))
            except httpx.TimeoutException:
                return Failure(kind="timeout", detail=f"{self._url}: no answer within {self._timeout:g} s")
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                if attempt == 1:
                    return Failure(kind="error", detail=f"{self._url}: {describe(error)}")
            except (httpx.HTTPError, ValueError) as error:
                return Failure(kind="error", detail=f"{self._url}: {describe(error)}")
        raise AssertionError("unreachable")

    def _post(self, body: dict[str, Any], deadline: float) -> bytes:
        # httpx limits each wait; a server that drips byte by byte is stopped by the deadline.
        parts: list[bytes] = []
        size = 0
        left = max(0.001, deadline - time.monotonic())
        # The text may hold lone surrogates; ASCII escapes carry them, UTF-8 could not.
        content = json.dumps(body).encode("ascii")
        headers = {"content-type": "application/json"}
        with self._client.stream("POST", self._url, content=content, headers=headers, timeout=left) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code} {response.reason_phrase}, expected 200")
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the reply took too long")
                if size > MAX_REPLY_BYTES:
                    raise ValueError(f"the reply is larger than {MAX_REPLY_BYTES} bytes")
        return b"".join(parts)

    def close(self) -> None:
        self._client.close()


def _read(content: bytes, num_rows: int) -> list[Outcome]:
    """Raises ValueError for a reply that does not have one reward per row."""
    try:
        reply: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reply is not JSON: {error}") from None
    if not isinstance(reply, dict) or not isinstance(cast(dict[str, Any], reply).get("rewards"), list):
        raise ValueError('the reply is not {"rewards": [...]}')
    rewards = cast(list[Any], reply["rewards"])
    if len(rewards) != num_rows:
        raise ValueError(f"the reply has {len(rewards)} rewards for {num_rows} rows")
    return [_one(reward) for reward in rewards]


def _one(reward: Any) -> Outcome:
    if reward is None:
        return ABSTAINED
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return failed("error", f"the endpoint returned {reward!r:.80}; allowed are a number and null")
    try:
        return valued(float(reward))
    except OverflowError:
        return failed("non_finite", "the endpoint returned an integer beyond float32")
