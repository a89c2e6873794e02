"""Hand-made reports, and small suites that run in their own folders."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Runs in this process forget their imports, and torch registers this only once.
from torchparts_conformance import _report
from torchparts_conformance.requirements import _cases

sys.path.insert(0, str(Path(__file__).parent))  # --import-mode=importlib does not add it
import small_suite

pytest_plugins = ["pytester"]


class Suite:
    """A small suite in a folder that can be run."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.root = Path(pytester.path)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setattr(_cases, "CASES", self.root / "cases")
        self.write("adapter.py", small_suite.ADAPTER)
        self.write_cases()
        pytester.syspathinsert()

    def write(self, name: str, text: str) -> None:
        """Write a file of the suite."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        if name == "cases/ckpt_wrap/test_cases.py":
            # An adapter may not claim a profile without requirements.
            signs = {"robust": "SHOULD", "in-place": '"in-place"'}
            claimed = {profile for profile, sign in signs.items() if sign in text}
            adapter = small_suite.ADAPTER.replace('{"robust", "in-place"}', repr(claimed or set()))
            self.write("adapter.py", adapter)

    def write_cases(self, **bodies: str | None) -> None:
        """Write the file of cases, with other bodies for `one`, `two` or `three`."""
        self.write("cases/ckpt_wrap/test_cases.py", small_suite.cases(**bodies))

    def write_case(self, body: str, *, and_two: bool = False) -> None:
        """Write a case of CW-001 with a body, and optionally a passing case of CW-002."""
        rest = {} if and_two else {"two": None}
        self.write_cases(one=body, three=None, **rest)

    def run(self, *options: str, impl: str = "adapter:good") -> pytest.RunResult:
        """Run the suite; the report is written to `out`."""
        where = ["--impl", impl, "--area", "ckpt-wrap", "--out", str(self.root / "out")]
        plugin = ["-p", "torchparts_conformance.plugin", "--rootdir", str(self.root)]
        return self.pytester.runpytest_inprocess(*plugin, *where, *options, "cases")

    def report(self) -> dict[str, Any]:
        """Read the report of the last run."""
        return _report.read(self.root / "out" / "report.json")

    def outcomes(self) -> dict[str, str]:
        """Return the outcome of each requirement in the last run, on the CPU."""
        return {r["id"]: r["outcome"] for r in self.report()["rows"] if r["device"] == "cpu"}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """A suite of three requirements: CW-001 (core), CW-002 (robust, SHOULD), CW-003 (in-place)."""
    return Suite(pytester, monkeypatch)


@pytest.fixture
def make_report(suite: Suite) -> Callable[..., dict[str, Any]]:
    """`make_report(...)` makes a report about the small suite, with outcomes by requirement."""

    def make(
        outcomes: dict[str, str] | None = None,
        *,
        devices: tuple[str, ...] = ("cpu",),
        name: str = "mine",
        adapter: str = "mine:adapter",
        reason: str = "",
        problems: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        rows = [
            {
                "id": id,
                "case": case.name,
                "device": device,
                "outcome": (outcomes or {}).get(id, "pass"),
                "reason": reason,
                "where": "",
                "duration_s": 0.1,
            }
            for id, cases in _cases.cases_by_id().items()
            for case in cases
            for device in devices
            if case.declares[0].is_for(device)
        ]
        return _report.build(
            implementation={
                "name": name,
                "version": "1.0",
                "adapter": adapter,
                "distributions": {"mine": "1.0"},
            },
            environment={"torch": "2.13.0", "card": "A card" if "cuda" in devices else None},
            claims={
                "areas": ["ckpt-wrap"],
                "devices": list(devices),
                "profiles": None,
                "capabilities": {"ckpt-wrap": ["in-place", "robust"]},
            },
            rows=rows,
            problems=problems,
        )

    return make


@pytest.fixture
def stored(make_report, tmp_path) -> Callable[..., Path]:
    """`stored(...)` makes and stores a report and returns its path."""

    def store(*args: Any, place: str = "report.json", **changes: Any) -> Path:
        _report.write(tmp_path / place, _report.to_text(make_report(*args, **changes)))
        return tmp_path / place

    return store


@pytest.fixture
def package() -> Path:
    """The folder of the suite's package."""
    return _cases.PACKAGE
