"""Worker processes for code that may hang or crash: one call per row, each with a time limit.

Processes and not threads, since a thread that hangs cannot be stopped. They are started fresh (spawn), as a
forked copy of a process with a loaded model and its threads may deadlock.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from klimb.errors import RewardError
from klimb.reward import worker_side
from klimb.reward.base import Failure

T = TypeVar("T")

# Loading a user's file once, at start-up; it may import a large library.
START_SECONDS = 120.0


class WorkerPool:
    """A pool that several components share. Processes start with the first call and end with `close`.

    workers: their number. timeout_seconds: per call. max_failed_fraction: once more than this share of a
    batch has timed out the run will stop anyway, so the rest of the batch is not waited for.
    """

    def __init__(self, *, workers: int, timeout_seconds: float, max_failed_fraction: float = 1.0) -> None:
        self.timeout_seconds = timeout_seconds
        self._workers = workers
        self._max_failed_fraction = max_failed_fraction
        self._needed: tuple[str, ...] = ()
        self._pool: ProcessPool | None = None

    def require(self, item: str) -> None:
        """Have every worker load a module, or a .py file by its path, before its first call."""
        if item not in self._needed:
            self.close()
            self._needed = (*self._needed, item)

    def call_once(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        """One call at start-up with a long limit. RewardError when it hangs or its process dies."""
        try:
            result = self._schedule(function, arguments, START_SECONDS).result(timeout=START_SECONDS)
        except TimeoutError:
            self.close()
            raise RewardError(
                f"A reward's worker process was not ready after {START_SECONDS:g} s. Does the file do work when "
                "it is imported? Keep its top level to imports and definitions."
            ) from None
        except (ProcessExpired, BrokenProcessPool) as error:
            self.close()
            raise RewardError(
                f"A reward's worker process died while it started ({error}). If a script of yours starts klimb, "
                'put the call below: if __name__ == "__main__":'
            ) from None
        if isinstance(result, Failure):
            raise RewardError(f"A reward could not be set up: {result.detail}")
        return result

    def run(self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]], num_rows: int) -> list[T | Failure]:
        """Call `function` in the workers, once per tuple of arguments; results in order.

        A call that raised is a Failure of kind error, one past its limit is a Failure of kind timeout and its
        process is killed and replaced. num_rows: the batch's size, which max_failed_fraction refers to.
        Calls lost because idle processes died (not by their own doing) are made once more.
        """
        results = self._run(function, calls, num_rows)
        lost = [i for i, result in enumerate(results) if result is None]
        if lost:
            self.close()
            again = self._run(function, [calls[i] for i in lost], num_rows)
            for i, result in zip(lost, again, strict=True):
                results[i] = result
        died = Failure(kind="error", detail="the worker processes died twice")
        return [died if result is None else result for result in results]

    def _run(
        self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]], num_rows: int
    ) -> list[T | Failure | None]:
        futures: list[ProcessFuture[Any] | None] = []
        for arguments in calls:
            try:
                futures.append(self._schedule(function, arguments, self.timeout_seconds))
            except RuntimeError:
                # The pool broke while it was being filled.
                futures.append(None)
        results: list[T | Failure | None] = []
        timeouts = 0
        for future in futures:
            if future is not None and timeouts > self._max_failed_fraction * num_rows:
                future.cancel()
            result = None if future is None else self._result(future)
            timeouts += isinstance(result, Failure) and result.kind == "timeout"
            results.append(result)
        return results

    def _result(self, future: ProcessFuture[Any]) -> Any:
        try:
            return future.result()
        except TimeoutError:
            return Failure(kind="timeout", detail=f"no answer within {self.timeout_seconds:g} s")
        except CancelledError:
            return Failure(kind="timeout", detail="not waited for: too many rows before it timed out")
        except ProcessExpired as error:
            return Failure(kind="error", detail=f"its process died with exit code {error.exitcode}")
        except BrokenProcessPool:
            return None

    def _schedule(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> ProcessFuture[Any]:
        if self._pool is not None and not self._pool.active:
            # Its idle processes died, and pebble gives such a pool up.
            self.close()
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._workers,
                initializer=worker_side.start,
                initargs=(os.getpid(), self._needed),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool.schedule(worker_side.guarded, args=(function, arguments), timeout=timeout)

    def close(self) -> None:
        """End the processes, whatever they are doing. A later call starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
