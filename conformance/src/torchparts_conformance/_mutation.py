"""Run broken implementations, several at a time, on the cases that they must fail.

A process runs cases on one broken implementation after another, so that torch is imported once. A
fault that is not caught is tried again in a new process, because an earlier fault may have changed
the first one.
"""

from __future__ import annotations

import queue
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance._process import SESSION
from torchparts_conformance._worker import Worker
from torchparts_conformance.mutants import Mutant, find_mutants
from torchparts_conformance.requirements._areas import folder_of
from torchparts_conformance.requirements._cases import cases_by_id

START_S = 120.0
MUTANT_LIMIT_S = 600.0
CASE_LIMIT_S = 60.0
_CAUGHT = ("fail", "error", "not_run")


@dataclass(frozen=True)
class Tried:
    """A broken implementation, with the requirements that were run and those that failed.

    `failure` says why it could not be run, or is empty.
    """

    mutant: Mutant
    asked: frozenset[str]
    failed: frozenset[str] = frozenset()
    failure: str = ""

    @property
    def is_caught(self) -> bool:
        """Whether every requirement that was run failed."""
        return self.failed == self.asked and not self.failure

    def __str__(self) -> str:
        passed = ", ".join(sorted(self.asked - self.failed))
        return self.failure or (f"NOT CAUGHT by {passed}" if passed else "caught")


def try_all(
    folder: Path,
    areas: Iterable[str],
    *,
    requirements: Iterable[str] = (),
    base: str = "ours",
    jobs: int = 2,
) -> list[Tried]:
    """Run every broken implementation in the `<area>_<topic>.py` files of a folder.

    Args:
        folder: of the files.
        areas: whose files to use.
        requirements: run only these, if there are any.
        base: the working implementation to break.
        jobs: processes at a time.
    """
    wanted = frozenset(requirements)
    work = [
        (path, mutant, asked)
        for area in areas
        for path in mutant_files(folder, area)
        for mutant in find_mutants(path)
        if (asked := mutant.kills & wanted if wanted else mutant.kills)
    ]
    with tempfile.TemporaryDirectory(prefix="torchparts-mutants-") as logs:
        bench = _Bench(Path(logs), base, jobs, total=len(work))
        try:
            with ThreadPoolExecutor(jobs) as pool:
                return list(pool.map(lambda job: bench.judge(*job), work))
        finally:
            bench.close()


def mutant_files(folder: Path, area: str) -> list[Path]:
    """Return the files that hold broken implementations of an area."""
    return sorted(folder.glob(f"{folder_of(area)}*.py"))


class _Bench:
    """The worker processes, and the number of broken implementations they have run."""

    def __init__(self, logs: Path, base: str, jobs: int, *, total: int) -> None:
        self._logs, self._base, self._total = logs, base, total
        self._files = {
            id: {str(case.path) for case in cases} for id, cases in cases_by_id().items()
        }
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(jobs):
            self._idle.put(None)
        self._jobs, self._started, self._done = jobs, 0, 0

    def judge(self, path: Path, mutant: Mutant, asked: frozenset[str]) -> Tried:
        """Run one and print the result."""
        began = time.monotonic()
        job = {
            "files": sorted(set().union(*(self._files.get(id, set()) for id in asked))),
            "options": [
                f"--impl={self._base}",
                f"--area={mutant.area}",
                "--profile=all",
                f"--mutant={path.resolve()}::{mutant.name}",
                f"--requirement={','.join(sorted(asked))}",
                f"--case-limit={CASE_LIMIT_S}",
            ],
        }
        worker = self._idle.get()
        is_new = worker is None
        worker = worker or self._start()
        tried = self._try(worker, job, mutant, asked)
        if not tried.is_caught and not is_new:
            worker.end()
            worker = self._start()
            tried = self._try(worker, job, mutant, asked)
        self._idle.put(worker if worker.process.poll() is None else None)
        self._done += 1
        line = f"[{self._done}/{self._total}] {mutant.area} {mutant.name}: {tried}"
        sys.stderr.write(f"{line} ({time.monotonic() - began:.1f} s)\n")
        sys.stderr.flush()
        return tried

    def _start(self) -> Worker:
        self._started += 1
        return Worker(SESSION, log=self._logs / f"{self._started}.log", leads=True)

    def _try(
        self, worker: Worker, job: dict[str, Any], mutant: Mutant, asked: frozenset[str]
    ) -> Tried:
        """Run the cases once. A process that does not answer is ended."""
        if not worker.is_ready and not worker.becomes_ready(START_S):
            worker.end()
            return Tried(mutant, asked, failure=f"the process did not start: {worker.printed()}")
        worker.send(job)
        answer: dict[str, Any] | None = {}
        while answer is not None and "code" not in answer:
            try:
                answer = worker.answers.get(timeout=MUTANT_LIMIT_S)
            except queue.Empty:
                worker.end()
                return Tried(mutant, asked, failure=f"no answer in {MUTANT_LIMIT_S:g} s")
        if answer is None:
            worker.end()
            failure = f"the process ended with code {worker.process.wait()}"
            return Tried(mutant, asked, failure=failure)
        if answer["report"] is None:
            failure = f"the run ended with code {answer['code']} and without a report"
            return Tried(mutant, asked, failure=failure)
        rows = [row for row in answer["report"]["rows"] if row["id"] in asked]
        failed = frozenset(row["id"] for row in rows if row["outcome"] in _CAUGHT)
        return Tried(mutant, asked, failed, "" if rows else "there are no cases")

    def close(self) -> None:
        """End every process."""
        for _ in range(self._jobs):
            if (worker := self._idle.get()) is not None:
                worker.finish()
