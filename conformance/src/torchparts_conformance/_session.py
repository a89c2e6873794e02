"""The worker process that runs cases with pytest; see `_process` and `_mutation`.

A job has the files of cases and the options. While it runs, the process tells how many cases there
are, which one starts, and how each ended; the answer has pytest's exit code and the report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchparts_conformance import plugin
from torchparts_conformance._run import Run
from torchparts_conformance._worker import serve
from torchparts_conformance.requirements import _cases


class _Watch:
    """A pytest plugin that keeps the run and tells its progress."""

    run: Run | None = None

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Find the run that the suite's plugin has made."""
        self.run = plugin.run_of(config)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell the number of cases."""
        self._tell({"total": len(session.items)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell which case starts: the process may end in it."""
        self._tell({"start": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell how a case ended."""
        if report.when == "teardown" and self.run is not None:
            self._tell({"end": self.run.cases.outcome(report.nodeid)})


def _answer(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    settings = [f"--rootdir={_cases.CASES}", "-c", str(_cases.CASES / "pytest.ini")]
    # The last two collect garbage ten times per session, which takes most of a short one.
    for name in ("terminal", "unraisableexception", "threadexception"):
        settings += ["-p", f"no:{name}"]
    files = job["files"] or [str(_cases.CASES)]
    watch = _Watch(tell)
    code = pytest.main([*files, *settings, *job["options"]], plugins=[plugin, watch])
    report = None if watch.run is None else watch.run.report
    return {"code": int(code), "report": report}


if __name__ == "__main__":
    serve(_answer)
