"""Reports made by hand, and small suites that are run in folders of their own."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchparts_conformance._package import PACKAGE
from torchparts_conformance.commands import _runs
from torchparts_conformance.render import _badge, _render
from torchparts_conformance.report import _report
from torchparts_conformance.requirements import _cases
from torchparts_conformance.requirements._cases import Case, Mark
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.verify import _installed
from torchparts_conformance.verify._verify import Expected

sys.path.insert(0, str(Path(__file__).parent))  # pytest does not, with --import-mode=importlib
import small_suite

pytest_plugins = ["pytester"]


class Suite:
    """A small suite in a folder, that can be run."""

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
        if name == "cases/ckpt_wrap/test_cases.py" and "in-place" not in text:
            # An adapter may not claim a profile of which there is no requirement.
            adapter = small_suite.ADAPTER.replace('{"in-place"}', "set()")
            self.write("adapter.py", adapter)

    def write_cases(self, **bodies: str | None) -> None:
        """Write the file of cases, with other bodies for `one`, `two` or `three`."""
        self.write("cases/ckpt_wrap/test_cases.py", small_suite.cases(**bodies))

    def write_case(self, body: str, *, and_two: bool = False) -> None:
        """Write a case of CW-001 that does something, and maybe a right one of CW-002."""
        rest = {} if and_two else {"two": None}
        self.write_cases(one=body, three=None, **rest)

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

    def report(self) -> dict[str, Any]:
        """Read the report of the last run."""
        return _report.read(self.root / "out" / "report.json")

    def outcomes(self) -> dict[str, str]:
        """Give the outcome of each requirement in the last run, on the CPU."""
        return {r["id"]: r["outcome"] for r in self.report()["rows"] if r["device"] == "cpu"}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Give a suite of three requirements."""
    return Suite(pytester, monkeypatch)


@pytest.fixture
def registry() -> dict[str, Requirement]:
    """Give the requirements that made-up reports are about."""
    facts = {"since": "0.1.0", "rationale": "a reason"}
    return {
        "CW-001": Requirement(
            "CW-001", "ckpt-wrap", "MUST", "core", ("cpu", "cuda"), text="It MUST.", **facts
        ),
        "CW-002": Requirement(
            "CW-002", "ckpt-wrap", "SHOULD", "robust", ("cpu", "cuda"), text="It SHOULD.", **facts
        ),
    }


@pytest.fixture
def made_cases(registry: dict[str, Requirement], tmp_path: Path) -> tuple[Case, ...]:
    """Give the cases that made-up reports are about."""
    path = tmp_path / "test_a.py"
    return tuple(
        Case("ckpt-wrap", f"ckpt_wrap/test_a.py::{name}", 1, "", path, (Mark(id, 1, registry[id]),))
        for id, name in (("CW-001", "test_a"), ("CW-002", "test_b"))
    )


@pytest.fixture
def expected(registry: dict[str, Requirement], made_cases: tuple[Case, ...]) -> Expected:
    """Give what a verifier of made-up reports knows."""
    return Expected("0.1.0", registry, made_cases)


@pytest.fixture
def make_report(
    registry: dict[str, Requirement], made_cases: tuple[Case, ...]
) -> Callable[..., dict[str, Any]]:
    """Give a function that makes a report, with outcomes by requirement and other changes."""

    def make(
        outcomes: dict[str, str] | None = None,
        *,
        devices: tuple[str, ...] = ("cpu",),
        name: str = "mine",
        reason: str = "",
        where: str = "",
        problems: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        rows = [
            {
                "id": id,
                "case": case.name,
                "device": device,
                "area": "ckpt-wrap",
                "level": registry[id].level,
                "profile": registry[id].profile,
                "group": registry[id].group,
                "outcome": (outcomes or {}).get(id, "pass"),
                "reason": reason,
                "where": where,
                "duration_s": 0.1,
            }
            for case in made_cases
            for id in case.ids
            for device in devices
        ]
        return _report.build(
            suite={"name": "torchparts-conformance", "version": "0.1.0"},
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
def known_suite(monkeypatch, expected) -> None:
    """Let the commands take the made-up suite for the installed one."""
    monkeypatch.setattr(_installed, "load_registry", lambda: expected.registry)
    monkeypatch.setattr(_installed, "find_cases", lambda: expected.cases)


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
    return PACKAGE


CONTROLS = ("degenerate:do_nothing", "degenerate:always_raise")
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
