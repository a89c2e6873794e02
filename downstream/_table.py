"""A page of what was run with which library, written at the end of a run of pytest."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PARTS = ("ckpt-wrap", "mod-tracker", "flat-param", "sac-policies")


def library(*names: str) -> pytest.MarkDecorator:
    """Say which libraries a test is about; the first is the one it counts for."""
    return pytest.mark.library(*names)


def version_of(name: str) -> str:
    """The version of a distribution, or that there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class Table:
    """Counts outcomes by library and part, and writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._about: dict[str, tuple[str, str]] = {}
        self._used: dict[tuple[str, str], set[str]] = {}
        self._outcomes: dict[str, str] = {}
        self._reasons: Counter = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Learn what each test is about: its library, its part, and the test's name."""
        for item in items:
            case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
            marker = item.get_closest_marker("library")
            name = case.library if case is not None else marker.args[0] if marker else "torch"
            stem = item.path.stem.removeprefix("test_").replace("_", "-")
            part = next((part for part in PARTS if stem.startswith(part)), stem)
            self._about[item.nodeid] = (name, part)
            used = case.name if case is not None else _words(item)
            self._used.setdefault((name, part), set()).add(used)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of setup, call and teardown."""
        if report.outcome != "passed" or report.when == "call":
            before = self._outcomes.get(report.nodeid)
            if before != "failed":
                self._outcomes[report.nodeid] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            self._reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self) -> None:
        """Write the page."""
        self._path.write_text("\n".join(self._lines()) + "\n", encoding="utf-8")

    def _lines(self) -> list[str]:
        counts: dict[tuple[str, str], Counter] = {}
        for node, outcome in self._outcomes.items():
            counts.setdefault(self._about[node], Counter())[outcome] += 1
        total = sum(counts.values(), Counter())
        lines = [
            "# Downstream",
            "",
            "What other people's libraries do with these parts in the place of theirs, or beside "
            "them.",
            'Written by `nox -s downstream`; "passed" means gradients and weights equal to the '
            "plain model's to the last bit, unless the test says by how much not.",
            "",
            f"Python {platform.python_version()}, torch {version_of('torch')}, "
            f"{datetime.date.today():%Y-%m-%d}: {total['passed']} passed, "
            f"{total['failed']} failed, {total['skipped']} skipped.",
            "",
            "| library | version | part | passed | failed | skipped | used |",
            "|---|---|---|---|---|---|---|",
        ]
        for (name, part), count in sorted(counts.items()):
            used = ", ".join(sorted(self._used[name, part]))
            numbers = " | ".join(str(count[kind]) for kind in ("passed", "failed", "skipped"))
            lines.append(f"| {name} | {version_of(name)} | {part} | {numbers} | {used} |")
        if failed := sorted(node for node, kind in self._outcomes.items() if kind == "failed"):
            lines += ["", "## Failed", "", *(f"- `{node}`" for node in failed)]
        if self._reasons:
            lines += ["", "## Skipped", ""]
            lines += [f"- {reason} ({n} tests)" for reason, n in sorted(self._reasons.items())]
        return lines


def _words(item: pytest.Item) -> str:
    name = getattr(item, "originalname", None) or item.name
    return str(name).removeprefix("test_").replace("_", " ")
