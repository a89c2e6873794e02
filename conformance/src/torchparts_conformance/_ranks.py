"""A pool of worker processes that are reused between cases and form a gloo group for each case.

- A process imports torch once.
- A rank that raises, dies or does not answer fails only the case that it runs.
- After a death or a timeout every process of the pool is ended, and new ones are started.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import queue
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import RankError
from torchparts_conformance._subject import Subject
from torchparts_conformance._worker import Worker

MAX_WORLD_SIZE = 4
START_S = 120.0
GRACE_S = 3.0
_WORKER = "torchparts_conformance._rank_worker"


class RankPool:
    """Worker processes on this machine, started when first needed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torchparts-ranks-")
        self._workers: list[Worker] = []
        self._numbers = itertools.count()

    def start(self, world_size: int) -> None:
        """Start missing processes without waiting for them."""
        while len(self._workers) < world_size:
            log = Path(self._folder.name) / f"worker-{next(self._numbers)}.log"
            self._workers.append(Worker(_WORKER, log=log))

    def run(
        self,
        subject: Subject,
        area: str,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        timeout_s: float,
    ) -> list[Any]:
        """Run a module-level function on every rank of a new gloo group.

        Returns:
            The results by rank.
        """
        _check(world_size, function, args)
        self.start(world_size)
        self._wait_until_ready(world_size)
        job: dict[str, Any] = {
            "job": secrets.token_hex(8),
            "impl": subject.spec,
            "mutant": subject.mutant,
            "area": area,
            "world_size": world_size,
            "store": str(Path(self._folder.name) / f"store-{next(self._numbers)}"),
            "timeout_s": timeout_s,
            "module": function.__module__,
            "file": function.__code__.co_filename,
            "function": function.__name__,
            "args": list(args),
            "path": sys.path,
        }
        try:
            for rank in range(world_size):
                self._workers[rank].send({**job, "rank": rank})
            answers = self._collect(job["job"], world_size, time.monotonic() + timeout_s)
        except BaseException:  # the case was interrupted, but its job still runs in every process
            self.stop()
            raise
        _raise_cause(answers)
        return [answer["value"] for answer in answers]

    def _wait_until_ready(self, world_size: int) -> None:
        """Wait until the processes have imported torch."""
        deadline = time.monotonic() + START_S
        for worker in self._workers[:world_size]:
            if not worker.is_ready and not worker.becomes_ready(deadline - time.monotonic()):
                printed = worker.printed()
                self.stop()
                raise RankError(f"a worker process did not start in {START_S:g} s: {printed}")

    def _collect(self, job: str, world_size: int, deadline: float) -> list[dict[str, Any]]:
        """Wait for each rank; after one has failed, the others get `GRACE_S` seconds."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < world_size:
            for rank in set(range(world_size)) - set(answers):
                if answer := self._poll(rank, job):
                    answers[rank] = answer
                    if "error" in answer:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline or any(a.get("dead") for a in answers.values()):
                self.stop()
                silent = {"error": "did not answer in time", "silent": True, "trace": ""}
                answers = {rank: answers.get(rank, silent) for rank in range(world_size)}
        return [answers[rank] for rank in range(world_size)]

    def _poll(self, rank: int, job: str) -> dict[str, Any] | None:
        worker = self._workers[rank]
        try:
            answer = worker.answers.get(timeout=0.005)
        except queue.Empty:
            return None
        if answer is None:
            code = worker.process.wait()
            error = f"the process ended with code {code}"
            return {"error": error, "dead": True, "trace": worker.printed()}
        return answer if answer["job"] == job else None

    def stop(self) -> None:
        """End every process of the pool."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def close(self) -> None:
        """End every process and remove the pool's folder."""
        self.stop()
        self._folder.cleanup()


@functools.cache
def shared_pool() -> RankPool:
    """Return the pool of this process; it ends with the process."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


def _check(world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"ranks: world size must be 1 to {MAX_WORLD_SIZE}; got {world_size}.")
    if "<locals>" in function.__qualname__:
        raise ValueError(
            f"ranks: {function.__qualname__} is a local function, which other processes cannot "
            "import. Move it to the level of its module."
        )
    json.dumps(args)


def _raise_cause(answers: list[dict[str, Any]]) -> None:
    """Raise the error that probably caused the others."""
    failures = [(rank, answer) for rank, answer in enumerate(answers) if "error" in answer]
    if not failures:
        return
    rank, answer = min(
        failures, key=lambda f: (not (f[1].get("failed") or f[1].get("dead")), "silent" in f[1])
    )
    message = f"rank {rank}: {answer['error']}\n{answer['trace']}".rstrip()
    raise AssertionError(message) if answer.get("failed") else RankError(message)
