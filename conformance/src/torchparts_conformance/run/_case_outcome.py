"""What one phase of a case (setup, call, teardown) says about its outcome, and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchparts_conformance._errors import NotProvided
from torchparts_conformance.run._place import place_of
from torchparts_conformance.subject._adapters import one_line


def judge(
    call: pytest.CallInfo[None], report: pytest.TestReport, adapter: Path | None, area: str
) -> tuple[str, str, str]:
    """Give the outcome of one phase, why, and where; no outcome where the phase decides nothing."""
    outcome, reason = _outcome(call, report)
    raised = call.excinfo.value if call.excinfo else None
    if raised is None:
        return outcome, reason, ""
    return outcome, reason, place_of(raised, adapter, area, failed=outcome != "error")


def _outcome(call: pytest.CallInfo[None], report: pytest.TestReport) -> tuple[str, str]:
    if report.skipped or hasattr(report, "wasxfail"):
        said = one_line(call.excinfo.value) if call.excinfo else "a mark on the case"
        return "error", f"only the suite may skip, but {report.when} did: {said}"
    if report.failed:
        raised = call.excinfo.value if call.excinfo else AssertionError("failed")
        if isinstance(raised, NotProvided) and report.when == "call":
            return "not_provided", _plain(raised)
        failed = isinstance(raised, (AssertionError, pytest.fail.Exception))
        return ("fail" if failed and report.when == "call" else "error"), _plain(raised)
    return ("pass", "") if report.when == "call" else ("", "")


def _plain(raised: BaseException) -> str:
    """Give a reason without what differs from run to run: addresses, and folders of files."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x...", one_line(raised))
    return re.sub(r"(?<![\w:/])(?:/[\w.+@-]+)+/", "", text)
