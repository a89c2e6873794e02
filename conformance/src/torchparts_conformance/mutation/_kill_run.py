"""Runs every mutant through the cases of its area, a few at a time.

Rule 1: a worker process serves many mutants, so that torch is imported once in each.
Rule 2: a mutant that is not caught as declared is tried again in a process no fault was in before;
what came out there counts.
Rule 3: a process that does not answer in time is ended with all that it started.
"""

from __future__ import annotations

import dataclasses
import queue
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import RegistryError
from torchparts_conformance.mutants import Mutant, find_mutants
from torchparts_conformance.mutation import _kill_store
from torchparts_conformance.mutation._kill import Kill
from torchparts_conformance.mutation._kill_store import Failed, Store
from torchparts_conformance.requirements._registry import AREAS, Requirement, folder_of
from torchparts_conformance.subject import _isolation
from torchparts_conformance.subject._worker import Worker

START_S = 120.0
MUTANT_LIMIT_S = 900.0
CASE_LIMIT_S = 60.0
_WORKER = "torchparts_conformance.mutation._kill_worker"


@dataclasses.dataclass(frozen=True)
class _Job:
    """A mutant with its file, or None for the working implementation."""

    area: str
    base: str
    fingerprint: str
    requirements: tuple[str, ...] = ()
    path: Path = Path()
    mutant: Mutant | None = None

    @property
    def name(self) -> str:
        return self.mutant.name if self.mutant else ""

    @property
    def declared(self) -> set[str]:
        kills = set(self.mutant.kills) if self.mutant else set()
        return kills & set(self.requirements) if self.requirements else kills

    @property
    def key(self) -> str:
        return _kill_store.key(self.fingerprint, self.path, self.name)

    def options(self) -> dict[str, Any]:
        """Give the options of the run, by name."""
        fault = f"{self.path.resolve()}::{self.name}" if self.mutant else None
        limit = CASE_LIMIT_S if self.mutant else None
        asked = ",".join(self.requirements) or None
        return {
            "impl": self.base,
            "area": self.area,
            "mutant": fault,
            "requirement": asked,
            "case-limit": limit,
        }


def kill(
    folder: Path,
    areas: Iterable[str] = AREAS,
    *,
    requirements: Iterable[Requirement] = (),
    base: str = "ours",
    jobs: int = 2,
    cache: Path | None = None,
) -> list[Kill]:
    """Run every mutant of a folder of `<area>.py` and `<area>_<topic>.py` files.

    Args:
        folder: of the files.
        areas: whose mutants to run.
        requirements: where there are any, only their cases run, and only they count: a mutant
            has to fail those of them that it declares, and no other. Each of `areas` has one.
        base: the working implementation to break.
        jobs: processes at a time; each may start up to four more for cases on ranks.
        cache: file that remembers results of an earlier run.
    Raises:
        RegistryError: the working implementation does not pass, so that mutants show nothing.
    """
    requirements = list(requirements)
    bases = [_without_mutant(area, base, requirements) for area in areas]
    work = [
        dataclasses.replace(job, path=path, mutant=mutant)
        for job in bases
        for path in mutant_files(folder, job.area)
        for mutant in find_mutants(path)
    ]
    with tempfile.TemporaryDirectory(prefix="torchparts-mutants-") as logs:
        bench = _Bench(Path(logs), jobs, Store(cache), total=len(work))
        try:
            _must_pass(bases, bench.judge_all(bases))
            return bench.judge_all(work)
        finally:
            bench.close()


def _without_mutant(area: str, base: str, requirements: Iterable[Requirement]) -> _Job:
    own = tuple(r.id for r in requirements if r.area == area)
    return _Job(area, base, _kill_store.fingerprint(area, base, own), own)


def mutant_files(folder: Path, area: str) -> list[Path]:
    """Give the files that hold an area's mutants."""
    return sorted(folder.glob(f"{folder_of(area)}*.py"))


def _must_pass(bases: Sequence[_Job], kills: Iterable[Kill]) -> None:
    for job, found in zip(bases, kills, strict=True):
        if found.failed or found.failure:
            raise RegistryError(
                f"mutants of {job.area}: without a mutant {found.failure or list(found.failed)} "
                "fails, but nothing must. Correct that first."
            )


class _Bench:
    """The worker processes, and what they have found out so far."""

    def __init__(self, logs: Path, jobs: int, store: Store, *, total: int) -> None:
        self._logs, self._jobs, self._store, self._total = logs, jobs, store, total
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(jobs):
            self._idle.put(None)
        self._started = self._done = 0

    def judge_all(self, work: Iterable[_Job]) -> list[Kill]:
        """Judge several, as many at a time as there are processes; gives them in order."""
        with ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(self._judge, work))

    def _judge(self, job: _Job) -> Kill:
        began = time.monotonic()
        failed, failure = self._store.get(job.key), ""
        if failed is None:
            failed, failure = self._found_out(job)
        if not failure:
            self._store.put(job.key, failed)
        found = _to_kill(job, failed, failure)
        self._tell(found, job, time.monotonic() - began)
        return found

    def _found_out(self, job: _Job) -> tuple[Failed, str]:
        worker = self._idle.get()
        is_new = worker is None
        worker = worker or self._start()
        try:
            failed, failure = _ask(worker, job)
            if (failure or {id for id, _ in failed} != job.declared) and not is_new:
                worker.end()
                worker = self._start()
                failed, failure = _ask(worker, job)
            return failed, failure
        finally:
            if worker.process.poll() is not None:
                worker.end()
            self._idle.put(worker if worker.process.poll() is None else None)

    def _start(self) -> Worker:
        self._started += 1
        return Worker(
            _isolation.command(_WORKER), log=self._logs / f"{self._started}.log", leads=True
        )

    def _tell(self, found: Kill, job: _Job, took_s: float) -> None:
        if job.mutant is None:
            sys.stderr.write(f"{job.area} without a mutant: {took_s:.1f} s\n")
        else:
            self._done += 1
            line = f"[{self._done:>3}/{self._total}] {job.area} {job.name}: {found}"
            sys.stderr.write(f"{line} ({took_s:.1f} s)\n")
        sys.stderr.flush()

    def close(self) -> None:
        """End every process."""
        for _ in range(self._jobs):
            if (worker := self._idle.get()) is not None:
                worker.end()


def _ask(worker: Worker, job: _Job) -> tuple[Failed, str]:
    """Give what failed, or why that is not known; a process that is in doubt is ended."""
    if not worker.is_ready and not worker.becomes_ready(START_S):
        worker.end()
        return [], f"the process did not start: {worker.printed()}"
    worker.send(job.options())
    try:
        answer = worker.answers.get(timeout=MUTANT_LIMIT_S)
    except queue.Empty:
        answer = {"failure": f"no answer in {MUTANT_LIMIT_S:g} s"}
    if answer is None:
        answer = {"failure": f"the process ended with code {worker.process.wait()}"}
    if "failure" in answer:
        worker.end()
        return [], str(answer["failure"])
    return [(id, case) for id, case in answer["failed"]], ""


def _to_kill(job: _Job, failed: Failed, failure: str) -> Kill:
    return Kill(
        area=job.area,
        name=job.name,
        text=job.mutant.text if job.mutant else "",
        declared=tuple(sorted(job.declared)),
        failed=tuple(sorted({id for id, _ in failed})),
        cases=tuple(sorted({case for _, case in failed})),
        failure=failure,
    )
