"""Runs of pytest in forked processes, against a copy of the source that may be changed.

The parent has torch and pytest imported, and neither the package nor its tests. A child puts the
copy first on the path, runs the tests it is given until one fails, writes what happened into a
file, and ends. The checkout is only read.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOM_BYTES = 6 * 2**30
"""Address space that a child may add to the parent's: an endless list must not fill the machine."""

POLL_S = 0.05

AT_IMPORT = -1
"""Stands for a test in `Run.lines`, where a line ran before any test."""


@dataclass(frozen=True)
class Run:
    """What one child did.

    Attributes:
        status: "passed", "failed", "hung" or "died".
        by: the test that failed or hung, or a sentence.
        seconds: wall clock.
        tests: each test that ended: its seconds, its outcome, and whether it is distributed.
        lines: for each file of the copy and line: the tests that ran it, by position in `tests`,
            and `AT_IMPORT`.
    """

    status: str
    by: str
    seconds: float
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)


class Recorder:
    """A pytest plugin: which tests run in which order, and what each did.

    Attributes:
        order: the tests to run, in order, or None for all.
        beat: file whose text is the test that runs now; its age says for how long.
    """

    def __init__(self, order: Sequence[str] | None, beat: Path, coverage: Any = None) -> None:
        self.order, self.beat, self.coverage = order, beat, coverage
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed = ""

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave the wanted tests, in the wanted order."""
        if self.order is not None:
            place = {name: number for number, name in enumerate(self.order)}
            items[:] = sorted(
                (item for item in items if item.nodeid in place),
                key=lambda item: place[item.nodeid],
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Say which test runs, and take its time."""
        self.beat.write_text(item.nodeid, encoding="utf-8")
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
        dist = item.get_closest_marker("dist") is not None
        entry = self.tests[item.nodeid] = {"outcome": "skipped", "dist": dist}
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            entry["seconds"] = round(time.perf_counter() - start, 4)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the outcome of the test, a failure above all."""
        entry = self.tests.get(report.nodeid)
        if entry is None:
            return
        if report.failed:
            entry["outcome"], self.failed = "failed", self.failed or report.nodeid
        elif report.when == "call" and report.passed and entry["outcome"] != "failed":
            entry["outcome"] = "passed"

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be collected is a failure, too."""
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} (not collected)"


class Bench:
    """A copy of one package's source, and forked runs against it.

    Args:
        root: where pytest runs.
        source: folder that is put on the path, the package in it.
        package: import name.
        stall_s: seconds that one test may take before it counts as hanging.
    """

    def __init__(self, root: Path, source: Path, package: str, *, stall_s: float) -> None:
        self.root, self.package, self.stall_s = root, package, stall_s
        self.folder = Path(tempfile.mkdtemp(prefix="mutate-"))
        self.copy = self.folder / "src"
        shutil.copytree(source, self.copy, ignore=shutil.ignore_patterns("__pycache__"))
        self._writes = 0
        _preload(package)

    def close(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, file: str, text: str) -> None:
        """Replace one file of the copy."""
        path = self.copy / file
        path.write_text(text, encoding="utf-8")
        # Compiled files are told apart by size and whole seconds, and two mutants may share both.
        self._writes += 1
        stamp = 1_000_000_000 + self._writes
        os.utime(path, (stamp, stamp))

    def run(
        self,
        args: Sequence[str],
        *,
        order: Sequence[str] | None = None,
        usual_s: float = 0.0,
        coverage: bool = False,
        stop: bool = True,
    ) -> Run:
        """Run pytest with `args` in a child.

        Args:
            args: paths and options of pytest.
            order: the tests to run, in order; None for all.
            usual_s: longest time of a test among them when nothing is changed.
            coverage: whether to note which test runs which line.
            stop: whether the first failure ends the run.
        """
        beat, result = self.folder / "beat", self.folder / "result.json"
        beat.write_text("before the first test", encoding="utf-8")
        result.unlink(missing_ok=True)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            self._child(list(args), order, beat, result, coverage=coverage, stop=stop)
        limit_s = max(self.stall_s, 10 * usual_s)
        hung = _wait(child, beat, limit_s)
        seconds = time.monotonic() - start
        if hung:
            return Run("hung", beat.read_text(encoding="utf-8"), seconds)
        try:
            told = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Run("died", beat.read_text(encoding="utf-8"), seconds)
        return Run(seconds=seconds, **told)

    def log(self) -> str:
        """What the last child printed."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def _child(
        self,
        args: list[str],
        order: Sequence[str] | None,
        beat: Path,
        result: Path,
        *,
        coverage: bool,
        stop: bool,
    ) -> None:
        code = 1
        try:
            os.setsid()
            sink = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(sink, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
            told = self._pytest(args, order, beat, coverage=coverage, stop=stop)
            result.write_text(json.dumps(told), encoding="utf-8")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _pytest(
        self,
        args: list[str],
        order: Sequence[str] | None,
        beat: Path,
        *,
        coverage: bool,
        stop: bool,
    ) -> dict[str, Any]:
        _limit_memory()
        os.chdir(self.root)
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(self.folder / "compiled")
        sys.path.insert(0, str(self.copy))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.copy), before)))
        meter = _meter(self.copy) if coverage else None
        recorder = Recorder(order, beat, meter)
        options = ["-q", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status = int(pytest.main([*options, *(["-x"] if stop else []), *args], plugins=[recorder]))
        by = recorder.failed or ("" if status in (0, 5) else f"pytest ended with {status}")
        tests, lines = recorder.tests, {}
        if meter is not None:
            meter.stop()
            lines = _lines(meter, self.copy, list(tests))
        elif not by:
            # Tests of another copy than the changed one would pass whatever was changed.
            found = Path(importlib.import_module(self.package).__file__ or "")
            if not found.resolve().is_relative_to(self.copy.resolve()):
                raise RuntimeError(f"the tests imported {found}, not the copy in {self.copy}")
        return {"status": "failed" if by else "passed", "by": by, "tests": tests, "lines": lines}


def _wait(child: int, beat: Path, limit_s: float) -> bool:
    """Wait for the child; end it, and all it started, when one test takes too long."""
    hung = False
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.time() - beat.stat().st_mtime > limit_s:
            hung = True
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what a failed test may have left
    return hung


def _preload(package: str) -> None:
    """Import pytest's plugins, and put what is there out of the children's garbage collections."""
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        if plugin.module.partition(".")[0] != package:
            with contextlib.suppress(ImportError):
                plugin.load()
    gc.collect()
    gc.freeze()


def _limit_memory() -> None:
    status = Path("/proc/self/statm")
    if status.exists():
        used = int(status.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, hard))


def _meter(copy: Path) -> Any:
    from coverage import Coverage

    meter = Coverage(data_file=None, config_file=False, source=[str(copy)], messages=False)
    meter.start()
    return meter


def _lines(meter: Any, copy: Path, tests: list[str]) -> dict[str, dict[str, list[int]]]:
    numbers = {"": AT_IMPORT} | {name: number for number, name in enumerate(tests)}
    data, found = meter.get_data(), {}
    for path in data.measured_files():
        file = Path(path).relative_to(copy).as_posix()
        found[file] = {
            str(line): sorted(numbers[name] for name in names if name in numbers)
            for line, names in data.contexts_by_lineno(path).items()
        }
    return found
