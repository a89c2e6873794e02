"""A process that runs the cases of an area on one broken implementation after another.

It imports torch once, and keeps its worker processes for cases on ranks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from torchparts_conformance.report import _report
from torchparts_conformance.requirements._cases import CASES
from torchparts_conformance.subject._adapters import one_line
from torchparts_conformance.subject._worker import serve

CAUGHT = ("fail", "error", "not_run")
_SETTINGS = (
    *(str(CASES), f"--rootdir={CASES}", "-c", str(CASES / "pytest.ini")),
    *("-p", "torchparts_conformance.plugin", "-p", "no:terminal"),
)


def main() -> None:
    """Serve jobs until standard input ends."""
    serve(_answer, ready={"ready": True})


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"failed": _failed(job)}
    except Exception as error:  # said to whoever asked, who stops
        return {"failure": one_line(error)}


def _failed(job: dict[str, Any]) -> list[list[str]]:
    """Give requirement and case of each row that failed, of those that were asked for."""
    asked = job.get("requirement")
    options = [f"--{word}={value}" for word, value in job.items() if value is not None]
    with tempfile.TemporaryDirectory() as folder:
        code = pytest.main([*_SETTINGS, *options, f"--out={folder}"])
        report = Path(folder) / "report.json"
        if not report.exists():
            raise RuntimeError(f"the run ended with code {int(code)} and without a report")
        rows = _report.read(report)["rows"]
    if asked:  # cases of others did not run
        rows = [row for row in rows if row["id"] in asked.split(",")]
    if not rows:
        raise RuntimeError("there are no cases")
    return sorted([row["id"], row["case"]] for row in rows if row["outcome"] in CAUGHT)


if __name__ == "__main__":
    main()
