"""Run the cases in child processes, since an implementation may crash.

With two processes, each takes the next case that is not taken.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchparts_conformance import _report
from torchparts_conformance._errors import BAD_INPUT, ConformanceError, printable
from torchparts_conformance._worker import Worker

SESSION = "torchparts_conformance._session"
FINISHING_S = 60.0
_COMPLAINT = "ERROR: "
_SHOWN_EVERY_S = 10.0


class RunError(Exception):
    """A process of cases ended without a report."""


def run_cases(options: Sequence[str], *, jobs: int = 1) -> dict[str, Any]:
    """Run the cases, show progress, and return the report."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchparts-run-")))
        (folder / "share").mkdir()
        workers = [Worker(SESSION, log=folder / f"{number}.log") for number in range(jobs)]
        for number, worker in enumerate(workers):
            stack.callback(worker.finish)
            share = [f"--share={folder / 'share' / str(number)}"] if jobs > 1 else []
            worker.send({"files": [], "options": [*options, *share]})
        for worker in workers:  # callbacks run in reverse: all processes end at the same time
            stack.callback(worker.close)
        answers = _Followed(workers).answers()
        for worker, answer in zip(workers, answers, strict=True):
            if answer.get("code") == BAD_INPUT and (said := _complaint(worker)):
                raise ConformanceError(said)
        for worker, answer in zip(workers, answers, strict=True):
            if answer.get("report") is None:
                raise RunError(
                    f"the run ended without a report and {_how(worker, answer)}. Run the cases "
                    "with python -m pytest to see more."
                )
        return _report.merged(answer["report"] for answer in answers)


def _complaint(worker: Worker) -> str:
    lines = (line for line in worker.printed().splitlines() if line.startswith(_COMPLAINT))
    return next(lines, "").removeprefix(_COMPLAINT).strip()


def _how(worker: Worker, answer: dict[str, Any]) -> str:
    """Return how a process ended, the case that it was in, and its last line."""
    code = answer.get("code", worker.process.poll())
    how = f"by signal {-code}" if code is not None and code < 0 else f"with status {code}"
    during = f" during {answer['case']}" if answer.get("case") else ""
    lines = worker.printed().strip().splitlines()
    said = f"; its last line was {lines[-1].strip()!r:.200}" if lines else ""
    return f"{how}{during}{said}"


class _Followed:
    """Worker processes that run cases; shows the progress of all of them."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._total = 0
        self._outcomes: Counter[str] = Counter()
        self._began_s = self._shown_s = time.monotonic()

    def answers(self) -> list[dict[str, Any]]:
        """Return the answer of each process, or the case in which it ended.

        After Ctrl-C, which the processes get too, they may write incomplete reports.
        """
        found: dict[int, dict[str, Any]] = {}
        cases = [""] * len(self._workers)
        deadline = float("inf")
        while len(found) < len(self._workers) and time.monotonic() < deadline:
            try:
                for number in set(range(len(self._workers))) - set(found):
                    message = self._next(number)
                    if message is None or "code" in message:
                        found[number] = message or {"case": cases[number]}
                    else:
                        if "start" in message or "end" in message:
                            cases[number] = message.get("start", "")
                        self._take(message)
            except KeyboardInterrupt:
                deadline = min(deadline, time.monotonic() + FINISHING_S)
        return [found.get(n, {"case": case}) for n, case in enumerate(cases)]

    def _next(self, number: int) -> dict[str, Any] | None:
        """Return the next message of a process; None if it has ended."""
        try:
            message = self._workers[number].answers.get(timeout=0.02)
        except queue.Empty:
            return {}
        if message is None:
            self._workers[number].process.wait()
        return message

    def _take(self, message: dict[str, Any]) -> None:
        self._total = message.get("total", self._total)
        if "end" in message:
            self._outcomes[message["end"]] += 1
            self._show()

    def _show(self) -> None:
        done, now = self._outcomes.total(), time.monotonic()
        wrong = self._outcomes["fail"] + self._outcomes["error"]
        line = f"[{done}/{self._total}] {now - self._began_s:.0f} s"
        line = printable(line + (f", {wrong} wrong" if wrong else ""))
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if done == self._total else ""))
        elif now - self._shown_s > _SHOWN_EVERY_S or done == self._total:
            sys.stderr.write(f"{line}\n")
            self._shown_s = now
        sys.stderr.flush()
