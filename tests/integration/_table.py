"""A page of what was run with which library: `_table.py FOLDER PAGE` writes it from results.

Each run of pytest with `--results FOLDER` adds a line for every test as it ends, so that a crash
loses nothing but the test that crashed, which is told as such.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

PARTS = ("ckpt-wrap", "mod-tracker", "flat-param", "sac-policies")
KINDS = ("passed", "failed", "skipped")


def library(name: str) -> pytest.MarkDecorator:
    """Say which library a test is about."""
    return pytest.mark.library(name)


def version_of(name: str) -> str:
    """The version of a distribution, or that there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class Results:
    """Writes how each test began and ended, as lines of JSON."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._about: dict[str, dict[str, str]] = {}
        self._worst: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Learn what each test is about: its library, its part, and what it uses."""
        for item in items:
            case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
            marker = item.get_closest_marker("library")
            if case is not None and case.library == "timm":
                marker = None
            name = marker.args[0] if marker else case.library if case is not None else "torch"
            stem = item.path.stem.removeprefix("test_").replace("_", "-")
            words = str(getattr(item, "originalname", item.name)).removeprefix("test_")
            self._about[item.nodeid] = {
                "test": item.nodeid,
                "file": item.path.stem,
                "library": name,
                "part": next((part for part in PARTS if stem.startswith(part)), stem),
                "used": case.name if case is not None else words.replace("_", " "),
            }

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read has failed as a whole."""
        if report.failed:
            stem = Path(report.nodeid).stem
            self._about[report.nodeid] = {
                "test": report.nodeid,
                "file": stem,
                "library": "torch",
                "part": stem,
                "used": "collection",
            }
            self._write(report.nodeid, "failed", str(report.longrepr)[-2000:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Until it ends, a test has failed."""
        self._write(nodeid, "failed", "the process ended")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of setup, call and teardown."""
        told = report.longrepr
        reason = told[2] if isinstance(told, tuple) else str(told or "")[-2000:]
        now = (report.outcome, reason.removeprefix("Skipped: "))
        before = self._worst.get(report.nodeid, ("passed", ""))
        self._worst[report.nodeid] = before if before[0] != "passed" else now
        if report.when == "teardown":
            self._write(report.nodeid, *self._worst[report.nodeid])

    def _write(self, nodeid: str, outcome: str, reason: str) -> None:
        about = self._about[nodeid]
        with (self._folder / f"{about['file']}.jsonl").open("a", encoding="utf-8") as file:
            print(json.dumps({**about, "outcome": outcome, "reason": reason}), file=file)


def read(folder: Path) -> list[dict[str, Any]]:
    """The last line of every test."""
    last: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            last[result["test"]] = result
    return list(last.values())


def page(results: list[dict[str, Any]]) -> str:
    """The results by library and part, in Markdown."""
    counts: dict[tuple[str, str], Counter] = {}
    used: dict[tuple[str, str], set[str]] = {}
    for result in results:
        key = (result["library"], result["part"])
        counts.setdefault(key, Counter())[result["outcome"]] += 1
        used.setdefault(key, set()).add(result["used"])
    total = sum(counts.values(), Counter())
    lines = [
        "# Downstream",
        "",
        "Other libraries, used the way their users use them, with these parts in place of theirs "
        "or next to them.",
        "`nox -s downstream` writes this page. Where a test passed, gradients and weights "
        "equal the plain model's to the last bit, unless the test states a tolerance.",
        "",
        f"Python {platform.python_version()}, torch {version_of('torch')}, "
        f"{datetime.date.today():%Y-%m-%d}: "
        + ", ".join(f"{total[kind]} {kind}" for kind in KINDS)
        + ".",
        "",
        "| library | version | part | passed | failed | skipped | used |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, part), count in sorted(counts.items()):
        numbers = " | ".join(str(count[kind]) for kind in KINDS)
        words = ", ".join(sorted(used[name, part]))
        lines.append(f"| {name} | {version_of(name)} | {part} | {numbers} | {words} |")
    if failed := sorted(result["test"] for result in results if result["outcome"] == "failed"):
        lines += ["", "## Failed", "", *(f"- `{test}`" for test in failed)]
    reasons = Counter(result["reason"] for result in results if result["outcome"] == "skipped")
    if reasons:
        lines += ["", "## Skipped", ""]
        lines += [f"- {' '.join(why.split())}: {n}" for why, n in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def main(folder: str, path: str) -> int:
    """Write the page; 1 if a test failed or none was run."""
    results = read(Path(folder))
    Path(path).write_text(page(results), encoding="utf-8")
    return int(not results or any(result["outcome"] == "failed" for result in results))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
