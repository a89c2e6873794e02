"""A pool of worker processes that stay alive between cases and form a gloo group for each.

Rule 1: a process imports torch once and is used again, unless a case left it in doubt.
Rule 2: a rank that raises, dies or does not answer fails the case that asked, and no other.
Rule 3: after a death or a timeout every process of the pool is ended, and new ones are started.
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

from torchparts_conformance._errors import NotProvided, RankError
from torchparts_conformance.subject import _isolation
from torchparts_conformance.subject._subject import Subject
from torchparts_conformance.subject._worker import Worker

MAX_WORLD_SIZE = 4
START_S = 120.0
GRACE_S = 3.0
_WORKER = "torchparts_conformance.subject._rank_worker"


class RankPool:
    """Worker processes on this machine, started when first needed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torchparts-ranks-")
        self._workers: list[Worker] = []
        self._numbers = itertools.count()

    def start(self, world_size: int) -> None:
        """Start processes until there are enough, without waiting for them."""
        for _ in range(len(self._workers), world_size):
            self._workers.append(self._start_one())

    def _start_one(self) -> Worker:
        log = Path(self._folder.name) / f"worker-{next(self._numbers)}.log"
        return Worker(_isolation.command(_WORKER), log=log)

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
            What each rank returned, by rank.
        Raises:
            RankError: a rank crashed or did not answer in time.
            AssertionError: a rank's own assertion failed.
        """
        _check(world_size, function, args)
        self.start(world_size)
        self._wait_until_ready(world_size)
        number = next(self._numbers)
        job: dict[str, Any] = {
            "job": secrets.token_hex(8),
            "impl": subject.spec,
            "mutant": subject.mutant,
            "area": area,
            "world_size": world_size,
            "store": str(Path(self._folder.name) / f"store-{number}"),
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
        except BaseException:  # the case was ended, but its job still runs in every process
            self.stop()
            raise
        return [_value(rank, answer) for rank, answer in _failures_first(answers)]

    def _wait_until_ready(self, world_size: int) -> None:
        """Wait until the processes have imported torch."""
        deadline = time.monotonic() + START_S
        for worker in self._workers[:world_size]:
            if not worker.is_ready and not worker.becomes_ready(deadline - time.monotonic()):
                said = worker.printed()
                self.stop()
                raise RankError(
                    f"torchparts_conformance.ranks: a worker process did not start in {START_S:g} "
                    f"s, but each rank needs one. Correct what it said: {said}"
                )

    def _collect(self, job: str, world_size: int, deadline: float) -> list[dict[str, Any]]:
        """Wait for each rank; once one has failed, the others get only a moment more."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < world_size:
            for rank in set(range(world_size)) - set(answers):
                if answer := self._poll(rank, job):
                    answers[rank] = answer
                    if "error" in answer:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline or any(a.get("dead") for a in answers.values()):
                answers = self._give_up(answers, world_size)
        return [answers[rank] for rank in range(world_size)]

    def _poll(self, rank: int, job: str) -> dict[str, Any] | None:
        worker = self._workers[rank]
        try:
            answer = worker.answers.get(timeout=0.005)
        except queue.Empty:
            return None
        if answer is None:
            code = worker.process.wait()
            said = worker.printed()
            return {"error": f"the process ended with code {code}", "dead": True, "trace": said}
        return answer if answer["job"] == job else None

    def _give_up(
        self, answers: dict[int, dict[str, Any]], world_size: int
    ) -> dict[int, dict[str, Any]]:
        """End the pool, and fill in the ranks that have not answered."""
        self.stop()
        silent = {"error": "did not answer in time", "silent": True, "trace": ""}
        return {rank: answers.get(rank, silent) for rank in range(world_size)}

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
    """Give the pool of this process; it ends with it."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


def _check(world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(
            f"torchparts_conformance.ranks: world size {world_size} asked for, but the pool has 1 "
            f"to {MAX_WORLD_SIZE}. Ask for fewer."
        )
    if "<locals>" in function.__qualname__:
        raise ValueError(
            f"torchparts_conformance.ranks: {function.__qualname__} is a local function, but other "
            "processes import it. Move it to the level of its module."
        )
    json.dumps(args)


def _failures_first(answers: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Order answers so that the cause is raised, not the errors it brought about elsewhere."""
    ranked = list(enumerate(answers))
    if not any("error" in answer for answer in answers):
        return ranked
    return sorted(ranked, key=lambda item: _remoteness(item[1]))


def _remoteness(answer: dict[str, Any]) -> int:
    """Say how far an answer is likely to be from the cause of a failure."""
    signs = (answer.get("failed"), answer.get("dead"), "error" in answer and "silent" not in answer)
    return next((place for place, sign in enumerate(signs) if sign), len(signs)) + (
        "error" not in answer
    )


def _value(rank: int, answer: dict[str, Any]) -> Any:
    if "error" not in answer:
        return answer["value"]
    if answer.get("lacks"):
        raise NotProvided(answer["error"].partition(": ")[2])
    message = f"rank {rank}: {answer['error']}\n{answer['trace']}".rstrip()
    raise AssertionError(message) if answer.get("failed") else RankError(message)
