"""Run the cases in child processes, since an implementation may crash.

With two processes, each takes the next case that is not taken. A process reports progress in lines
that begin with `PROGRESS`. If it ends without a report, its last other line is shown.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torchparts_conformance import _report
from torchparts_conformance._errors import BAD_INPUT, ConformanceError, printable
from torchparts_conformance._run import PROGRESS
from torchparts_conformance._worker import environment
from torchparts_conformance.requirements._cases import CASES

FINISHING_S = 60.0
_COMPLAINT = "ERROR: "
_EVERY = 20


@dataclass
class Ended:
    """The end of a process: exit code, last case it started, last line, error of pytest."""

    status: int = 0
    case: str = ""
    last_line: str = ""
    complaint: str = ""

    def __str__(self) -> str:
        how = f"by signal {-self.status}" if self.status < 0 else f"with status {self.status}"
        during = f" during {self.case}" if self.case else ""
        said = f"; its last line was {self.last_line!r:.200}" if self.last_line else ""
        return f"{how}{during}{said}"


class RunError(Exception):
    """A process of cases ended without a report."""


def pytest_command() -> list[str]:
    """Return the command that runs the cases with the suite's own settings."""
    return [
        *(sys.executable, "-m", "pytest", str(CASES), f"--rootdir={CASES}"),
        *("-c", str(CASES / "pytest.ini"), "-p", "torchparts_conformance.plugin"),
    ]


def run_cases(options: Sequence[str], *, jobs: int = 1) -> dict[str, Any]:
    """Run the cases, show progress, and return the report."""
    with tempfile.TemporaryDirectory(prefix="torchparts-run-") as scratch:
        folder = Path(scratch)
        (folder / "share").mkdir()
        outs = [folder / str(number) for number in range(jobs)]
        commands = [
            [*pytest_command(), "-p", "no:terminal", "--progress", f"--out={out}", *options]
            + ([f"--share={folder / 'share' / out.name}"] if jobs > 1 else [])
            for out in outs
        ]
        ends = _watch(commands)
        if complaint := next((e.complaint for e in ends if e.status == BAD_INPUT), ""):
            raise ConformanceError(complaint)
        paths = [out / "report.json" for out in outs]
        for path, ended in zip(paths, ends, strict=True):
            if not path.exists():
                raise RunError(
                    f"the run ended without a report and {ended}. Run the cases with python -m "
                    "pytest to see more."
                )
        return _report.merged(map(_report.read, paths))


def _watch(commands: Sequence[Sequence[str]]) -> list[Ended]:
    """Run commands in parallel; after Ctrl-C they may write their reports."""
    ends = [Ended() for _ in commands]
    progress = _Progress()
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(),
            encoding="utf-8",
            errors="replace",
        )
        for command in commands
    ]
    listeners = []
    for process, ended in zip(processes, ends, strict=True):
        assert process.stderr is not None
        arguments = (process.stderr, ended, progress)
        listeners.append(threading.Thread(target=_listen, args=arguments, daemon=True))
        listeners[-1].start()
    for process, ended in zip(processes, ends, strict=True):
        ended.status = _wait(process)
    for listener in listeners:
        listener.join(5.0)  # a leftover child of a case may hold the pipe open
    return ends


def _wait(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:  # the process got it too, and writes an incomplete report
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(FINISHING_S)
        process.kill()
        return process.wait()


def _listen(pipe: IO[str], ended: Ended, progress: _Progress) -> None:
    with pipe:
        while line := pipe.readline(4096):
            if line.startswith(PROGRESS):
                word, _, rest = line.removeprefix(PROGRESS).strip().partition(" ")
                ended.case = rest if word == "start" else ""
                progress.take(word, rest)
            elif line.strip():
                ended.last_line = line.strip()
                if line.startswith(_COMPLAINT):
                    ended.complaint = line.removeprefix(_COMPLAINT).strip()


class _Progress:
    """Counts finished cases in all processes and shows the progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._outcomes: Counter[str] = Counter()
        self._began_s = time.monotonic()

    def take(self, word: str, rest: str) -> None:
        """Handle one line of a process, without its prefix."""
        with self._lock:
            if word == "total":
                self._total = int(rest)
            elif word == "end":
                self._outcomes[rest] += 1
                self._show()

    def _show(self) -> None:
        done, total = self._outcomes.total(), self._total
        wrong = self._outcomes["fail"] + self._outcomes["error"]
        line = f"[{done}/{total}] {time.monotonic() - self._began_s:.0f} s"
        line = printable(line + (f", {wrong} wrong" if wrong else ""))
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if done == total else ""))
        elif done % _EVERY == 0 or done == total:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
