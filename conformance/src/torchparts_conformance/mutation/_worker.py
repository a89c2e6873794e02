"""A process that runs cases on one broken implementation after another.

It imports torch once, and keeps its worker processes for cases on ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from torchparts_conformance import plugin
from torchparts_conformance.requirements._cases import CASES
from torchparts_conformance.subject._adapters import one_line
from torchparts_conformance.subject._worker import serve

CAUGHT = ("fail", "error", "not_run")
_SETTINGS = (
    *(f"--rootdir={CASES}", "-c", str(CASES / "pytest.ini")),
    # The latter two collect garbage ten times in each session, which takes most of its time.
    *("-p", "no:terminal", "-p", "no:unraisableexception", "-p", "no:threadexception"),
)


def main() -> None:
    """Serve jobs until standard input ends."""
    serve(_answer, ready={"ready": True})


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"failed": _failed(job)}
    except Exception as error:  # returned to the process that asked
        return {"failure": one_line(error)}


def _failed(job: dict[str, Any]) -> list[str]:
    """Return those of the requirements asked for that failed."""
    options = [f"--{word}={value}" for word, value in job["options"].items()]
    asked = job["options"]["requirement"].split(",")
    witness = _Witness()
    code = pytest.main([*job["files"], *_SETTINGS, *options], plugins=[plugin, witness])
    if witness.run is None or witness.run.report is None:
        raise RuntimeError(f"the run ended with code {int(code)} and without a report")
    rows = [row for row in witness.run.report["rows"] if row["id"] in asked]
    if not rows:
        raise RuntimeError("there are no cases")
    return sorted({row["id"] for row in rows if row["outcome"] in CAUGHT})


class _Witness:
    """The pytest plugin that finds the run, whose report is read at the end."""

    run: Any = None

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self.run = plugin.run_of(config)


if __name__ == "__main__":
    main()
