"""Tries broken implementations, a few at a time, each on the cases of what it breaks.

A worker process serves many of them, so that torch is imported once in each. A fault that is not
caught is tried again in a new process, because an earlier one may have left something behind. A
process that does not answer in time is ended with all that it started.
"""

from __future__ import annotations

import queue
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance.mutants import Mutant, find_mutants
from torchparts_conformance.requirements._areas import folder_of
from torchparts_conformance.requirements._cases import Case, cases_by_id
from torchparts_conformance.subject import _isolation
from torchparts_conformance.subject._worker import Worker

START_S = 120.0
MUTANT_LIMIT_S = 600.0
CASE_LIMIT_S = 60.0
_WORKER = "torchparts_conformance.mutation._worker"


@dataclass(frozen=True)
class Tried:
    """A broken implementation, which of its requirements were tried, and which of them failed.

    `failure` says why it could not be tried, and is empty otherwise.
    """

    mutant: Mutant
    asked: frozenset[str]
    failed: frozenset[str] = frozenset()
    failure: str = ""

    @property
    def is_caught(self) -> bool:
        """Whether every requirement that was tried failed."""
        return self.failed == self.asked and not self.failure

    def __str__(self) -> str:
        passed = ", ".join(sorted(self.asked - self.failed))
        return self.failure or (f"NOT CAUGHT by {passed}" if passed else "caught")


@dataclass(frozen=True)
class _Job:
    path: Path
    mutant: Mutant
    asked: frozenset[str]
    base: str

    def to_json(self, cases: Mapping[str, Sequence[Case]]) -> dict[str, Any]:
        files = {str(case.path) for id in self.asked for case in cases[id]}
        return {
            "files": sorted(files),
            "options": {
                "impl": self.base,
                "area": self.mutant.area,
                "mutant": f"{self.path.resolve()}::{self.mutant.name}",
                "requirement": ",".join(sorted(self.asked)),
                "case-limit": CASE_LIMIT_S,
            },
        }


def try_all(
    folder: Path,
    areas: Iterable[str],
    *,
    requirements: Iterable[str] = (),
    base: str = "ours",
    jobs: int = 2,
) -> list[Tried]:
    """Try every broken implementation in the `<area>_<topic>.py` files of a folder.

    Args:
        folder: of the files.
        areas: whose files to use.
        requirements: if there are any, only these are tried.
        base: the working implementation to break; `run` shows that it works.
        jobs: processes at a time; each may start up to four more for cases on ranks.
    """
    wanted = frozenset(requirements)
    work = [
        _Job(path, mutant, asked, base)
        for area in areas
        for path in mutant_files(folder, area)
        for mutant in find_mutants(path)
        if (asked := mutant.kills & wanted if wanted else mutant.kills)
    ]
    with tempfile.TemporaryDirectory(prefix="torchparts-mutants-") as logs:
        bench = _Bench(Path(logs), jobs, total=len(work))
        try:
            with ThreadPoolExecutor(jobs) as pool:
                return list(pool.map(bench.judge, work))
        finally:
            bench.close()


def mutant_files(folder: Path, area: str) -> list[Path]:
    """Return the files that hold broken implementations of an area."""
    return sorted(folder.glob(f"{folder_of(area)}*.py"))


class _Bench:
    """The worker processes, and how many broken implementations they have tried."""

    def __init__(self, logs: Path, jobs: int, *, total: int) -> None:
        self._logs, self._jobs, self._total = logs, jobs, total
        self._cases = cases_by_id()
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(jobs):
            self._idle.put(None)
        self._started = self._done = 0

    def judge(self, job: _Job) -> Tried:
        """Try one, and print what came of it."""
        began = time.monotonic()
        found = self._tried(job)
        self._done += 1
        line = f"[{self._done:>3}/{self._total}] {job.mutant.area} {job.mutant.name}: {found}"
        sys.stderr.write(f"{line} ({time.monotonic() - began:.1f} s)\n")
        sys.stderr.flush()
        return found

    def _tried(self, job: _Job) -> Tried:
        worker = self._idle.get()
        is_new = worker is None
        worker = worker or self._start()
        try:
            found = self._ask(worker, job)
            if not found.is_caught and not is_new:
                worker.end()
                worker = self._start()
                found = self._ask(worker, job)
            return found
        finally:
            if worker.process.poll() is not None:
                worker.end()
            self._idle.put(worker if worker.process.poll() is None else None)

    def _start(self) -> Worker:
        self._started += 1
        log = self._logs / f"{self._started}.log"
        return Worker(_isolation.command(_WORKER), log=log, leads=True)

    def _ask(self, worker: Worker, job: _Job) -> Tried:
        """Return what failed; a process that is in doubt is ended."""
        if not worker.is_ready and not worker.becomes_ready(START_S):
            worker.end()
            why = f"the process did not start: {worker.printed()}"
            return Tried(job.mutant, job.asked, failure=why)
        worker.send(job.to_json(self._cases))
        try:
            answer = worker.answers.get(timeout=MUTANT_LIMIT_S)
        except queue.Empty:
            answer = {"failure": f"no answer in {MUTANT_LIMIT_S:g} s"}
        if answer is None:
            answer = {"failure": f"the process ended with code {worker.process.wait()}"}
        if "failure" in answer:
            worker.end()
            return Tried(job.mutant, job.asked, failure=str(answer["failure"]))
        return Tried(job.mutant, job.asked, frozenset(answer["failed"]))

    def close(self) -> None:
        """End every process."""
        for _ in range(self._jobs):
            if (worker := self._idle.get()) is not None:
                worker.end()
