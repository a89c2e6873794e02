"""Reports made by hand, and small suites that are run in folders of their own."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchparts_conformance.commands import _runs
from torchparts_conformance.listing._entry import Entry, Run
from torchparts_conformance.render import _badge, _render
from torchparts_conformance.report import _report
from torchparts_conformance.requirements import _manifest, _registry
from torchparts_conformance.requirements._manifest import Manifest, Row
from torchparts_conformance.requirements._registry import Requirement
from torchparts_conformance.verify import _installed
from torchparts_conformance.verify._verify import Expected

pytest_plugins = ["pytester"]

small_suite = types.SimpleNamespace(
    **runpy.run_path(str(Path(__file__).with_name("small_suite.py")))
)


class Suite:
    """A small suite in a folder, that can be frozen and run."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.root = Path(pytester.path)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setattr(_registry, "SPEC", self.root / "spec")
        monkeypatch.setattr(_manifest.load_manifest, "__defaults__", (self.root / "lock.json",))
        monkeypatch.setattr(_manifest.file_fingerprints, "__defaults__", (self.root,))
        self.write("spec/ckpt_wrap.toml", small_suite.SPEC)
        self.write("adapter.py", small_suite.ADAPTER)
        self.write("cases/ckpt_wrap/test_cases.py", small_suite.CASES)
        pytester.syspathinsert()

    def write(self, name: str, text: str) -> None:
        """Write a file of the suite."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")

    def write_case(self, body: str, *, and_two: bool = False) -> None:
        """Write a case of CW-001 that does something, and maybe a right one of CW-002, over all."""
        rest = small_suite.CASE_TWO if and_two else ""
        self.write("cases/ckpt_wrap/test_cases.py", small_suite.ONE_CASE.format(body=body) + rest)

    def run(self, *options: str, impl: str = "adapter:good") -> pytest.RunResult:
        """Run the suite; the report is written to `out`."""
        where = ["--impl", impl, "--area", "ckpt-wrap", "--out", str(self.root / "out")]
        everything = [
            "-p",
            "torchparts_conformance.plugin",
            "--rootdir",
            str(self.root),
            *where,
            *options,
            "cases",
        ]
        return self.pytester.runpytest_inprocess(*everything)

    def freeze(self) -> None:
        """Make the list of cases final."""
        self.run("--collect-only", f"--freeze={self.root / 'lock.json'}", "--device=cpu,cuda")

    def report(self) -> dict[str, Any]:
        """Read the report of the last run."""
        return _report.read(self.root / "out" / "report.json")

    def outcomes(self) -> dict[str, str]:
        """Give the outcome of each requirement in the last run, on the CPU."""
        return {r["id"]: r["outcome"] for r in self.report()["rows"] if r["device"] == "cpu"}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Give a frozen suite of three requirements."""
    made = Suite(pytester, monkeypatch)
    made.freeze()
    return made


@pytest.fixture
def registry() -> dict[str, Requirement]:
    """Give the requirements that made-up reports are about."""
    facts = {"since": "0.1.0", "source": "none", "rationale": "a reason"}
    return {
        "CW-001": Requirement(
            "CW-001", "ckpt-wrap", "MUST", "core", ("cpu", "cuda"), text="It MUST.", **facts
        ),
        "CW-002": Requirement(
            "CW-002", "ckpt-wrap", "SHOULD", "robust", ("cpu", "cuda"), text="It SHOULD.", **facts
        ),
    }


@pytest.fixture
def frozen() -> Manifest:
    """Give the frozen list that made-up reports are about."""
    rows = (
        Row("CW-001", "ckpt_wrap/test_a.py::test_a"),
        Row("CW-002", "ckpt_wrap/test_a.py::test_b"),
    )
    return Manifest(rows, {"spec/ckpt_wrap.toml": "0" * 64})


@pytest.fixture
def expected(registry: dict[str, Requirement], frozen: Manifest) -> Expected:
    """Give what a verifier of made-up reports knows."""
    return Expected("0.1.0", frozen, registry)


@pytest.fixture
def make_report(
    registry: dict[str, Requirement], frozen: Manifest
) -> Callable[..., dict[str, Any]]:
    """Give a function that makes a report, with outcomes by requirement and other changes."""

    def make(
        outcomes: dict[str, str] | None = None,
        *,
        devices: tuple[str, ...] = ("cpu",),
        name: str = "mine",
        reason: str = "",
        where: str = "",
        is_frozen: bool = True,
        problems: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        rows = [
            {
                "id": row.id,
                "case": row.case,
                "device": device,
                "area": "ckpt-wrap",
                "level": registry[row.id].level,
                "profile": registry[row.id].profile,
                "group": registry[row.id].group,
                "outcome": (outcomes or {}).get(row.id, "pass"),
                "reason": reason,
                "where": where,
                "duration_s": 0.1,
            }
            for row in frozen.rows
            for device in devices
        ]
        return _report.build(
            suite={
                "name": "torchparts-conformance",
                "version": "0.1.0",
                "manifest_sha256": frozen.sha256,
                "frozen": is_frozen,
            },
            implementation={
                "name": name,
                "version": "1.0",
                "adapter": "mine:adapter",
                "adapter_sha256": None,
                "distributions": [
                    {
                        "name": name,
                        "version": "1.0",
                        "kind": "record",
                        "sha256": "1" * 64,
                        "wheel_sha256": None,
                    }
                ],
            },
            environment={
                "python": "3.11.7",
                "torch": "2.13.0",
                "platform": "Linux-x86_64",
                "cpu": "AVX2",
                "cuda": None,
                "gpu": None,
            },
            claims={
                "areas": ["ckpt-wrap"],
                "devices": list(devices),
                "profiles": None,
                "capabilities": {},
            },
            rows=rows,
            problems=problems,
        )

    return make


@pytest.fixture
def stored(make_report, tmp_path) -> Callable[..., Path]:
    """Give a function that stores a report and its badges, and gives the folder."""

    def store(place="one", **changes):
        folder = tmp_path / place
        _render.write(folder / "report.json", _report.to_text(make_report(**changes)))
        for badge in _badge.badges(make_report(**changes)):
            _render.write(folder / "badge.svg", _badge.to_svg(badge))
        return folder

    return store


@pytest.fixture
def by_older_list(make_report) -> dict[str, Any]:
    """Give a report that the list of version 0.0.9 judged, well sealed."""
    report = make_report()
    report["suite"]["list"] = {"version": "0.0.9", "sha256": "1" * 64}
    report |= _report.derived(report)
    return {**report, "seal": _report.seal(report)}


@pytest.fixture
def known_suite(monkeypatch, frozen, registry) -> None:
    """Let the commands take the made-up suite for the installed one."""
    monkeypatch.setattr(_installed._manifest, "load_manifest", lambda: frozen)
    monkeypatch.setattr(_installed, "load_registry", lambda: registry)


@pytest.fixture
def changed() -> Callable[..., dict[str, Any]]:
    """Give a function that says something else of a report's implementation, well sealed."""

    def change(report, **implementation):
        edited = copy.deepcopy(report)
        edited["implementation"].update(implementation)
        edited |= _report.derived(edited)
        return {**edited, "seal": _report.seal(edited)}

    return change


@pytest.fixture
def entry(make_report) -> Entry:
    """Give an entry of the list that nobody has run again."""
    address, day = "https://example.org/mine", datetime.date(2026, 11, 22)
    return Entry("mine:adapter", f"{address}/issues", address, day, report=make_report())


@pytest.fixture
def ran() -> Callable[..., Entry]:
    """Give a function that gives an entry after runs with these results."""

    def run(entry, *results, day=None):
        day, by = day or entry.submitted, "https://example.org/runs/1"
        return dataclasses.replace(entry, runs=tuple(Run(day, result, by) for result in results))

    return run


@pytest.fixture
def built() -> Callable[[Path, Path], Path]:
    """Give a function that builds the wheel of a source into a folder."""

    def build(source: Path, folder: Path) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
        (wheel,) = folder.glob("*.whl")
        return wheel

    return build


@pytest.fixture
def package() -> Path:
    """Give the folder of the suite's own package."""
    return _manifest.PACKAGE


CONTROLS = ("torch", "degenerate:do_nothing", "degenerate:always_raise")
_Control = tuple[subprocess.Popen, Path]
_RUNNING = pytest.StashKey[dict[str, _Control]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests last that wait for the longest runs."""
    items.sort(key=_waits)


def _waits(item: pytest.Item) -> bool:
    return "control_rows" in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the longest runs first: they go on beside all other tests."""
    if any(map(_waits, session.items)) and not session.config.option.collectonly:
        root = Path(tempfile.mkdtemp(prefix="torchparts-controls-"))
        session.config.stash[_RUNNING] = {
            name: _start(name, root / str(number)) for number, name in enumerate(CONTROLS)
        }
        session.config.add_cleanup(lambda: _end(session.config.stash[_RUNNING], root))


def _start(name: str, folder: Path) -> _Control:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [*_runs.pytest_command(), f"--impl={name}", f"--out={folder}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **quiet), folder


def _end(running: dict[str, _Control], root: Path) -> None:
    for process, _ in running.values():
        process.kill()
        process.wait()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def control_rows(request) -> dict[str, list[dict[str, Any]]]:
    """Wait for implementations whose outcome is known, over all areas; gives rows by name."""
    running = request.config.stash[_RUNNING]
    for process, _ in running.values():
        process.wait(timeout=500)
    return {
        name: _report.read(folder / "report.json")["rows"] for name, (_, folder) in running.items()
    }
