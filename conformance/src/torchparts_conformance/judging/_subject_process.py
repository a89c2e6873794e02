"""The process that runs the cases on a stranger's code, and tells its judge what came out.

It is given one job on its standard input, and tells what it has to on its standard output, both as
JSON. What it prints otherwise goes to its standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from torchparts_conformance import plugin
from torchparts_conformance.report import _report
from torchparts_conformance.requirements._cases import CASES
from torchparts_conformance.subject import _tamper
from torchparts_conformance.subject._ranks import shared_pool


def main() -> int:
    """Run the cases, and tell the report at the end."""
    job = json.loads(sys.stdin.readline())
    tell = _teller(job["word"])
    # The judges are remembered before pytest reads a case or anything imports the adapter.
    look = _tamper.guard()
    run: list[Any] = []
    options = [*_SETTINGS, *job["options"]]
    status = int(pytest.main(options, plugins=[plugin, Witness(tell, run)]))
    shared_pool().close()
    if run and run[0].report is not None:
        tell({"report": _report.to_text(run[0].report), "replaced": look()})
    return status


class Witness:
    """The plugin through which a run tells each outcome, and is found when it is over."""

    def __init__(self, tell: Callable[[Mapping[str, Any]], None], run: list[Any]) -> None:
        self._tell, self._run = tell, run

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Let the run tell its outcomes."""
        if (run := plugin.run_of(config)) is not None:
            run.tell = self._tell
            self._run.append(run)


def _teller(word: str) -> Callable[[Mapping[str, Any]], None]:
    """Give the function that tells the judge something; nothing else may print to its pipe."""
    told = os.dup(1)
    os.dup2(2, 1)
    write, dumps = os.write, json.dumps

    def tell(something: Mapping[str, Any]) -> None:
        rest = (dumps({**something, "word": word}) + "\n").encode()
        while rest:
            rest = rest[write(told, rest) :]

    return tell


_SETTINGS = (
    *(str(CASES), f"--rootdir={CASES}", "-c", str(CASES / "pytest.ini")),
    *("-p", "no:terminal", "--progress"),
)
