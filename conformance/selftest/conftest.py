"""Reports made by hand, and small suites that are run in folders of their own."""

from __future__ import annotations

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

from torchparts_conformance.commands import _runs
from torchparts_conformance.report import _report
from torchparts_conformance.requirements import _manifest, _registry
from torchparts_conformance.requirements._manifest import Manifest, Row
from torchparts_conformance.requirements._registry import Requirement
from torchparts_conformance.verify._verify import Expected

pytest_plugins = ["pytester"]

SPEC = """
[CW-001]
level = "MUST"
profile = "core"
devices = ["cpu", "cuda"]
since = "0.1.0"
text = "It MUST work."
source = "none"
rationale = "it is the point"

[CW-002]
level = "SHOULD"
profile = "robust"
devices = ["cpu"]
since = "0.1.0"
text = "It SHOULD hold."
source = "none"
rationale = "people rely on it"

[CW-003]
level = "MUST"
profile = "in-place"
devices = ["cpu"]
since = "0.1.0"
text = "It MUST change nothing."
source = "none"
rationale = "names matter"
"""
ADAPTER = """
import types
from torchparts_conformance import Implementation

good = Implementation(
    "good", "1", parts={"ckpt-wrap": types.SimpleNamespace(answer=42)},
    capabilities={"ckpt-wrap": {"in-place"}},
)
plain = Implementation("plain", "1", parts={"ckpt-wrap": types.SimpleNamespace(answer=42)})
empty = Implementation("empty", "1")
"""
CASES = """
import pytest
from torchparts_conformance import requirement

@requirement("CW-001")
def test_one(part):
    \"\"\"The part answers.\"\"\"
    assert part.answer == 42

@requirement("CW-002")
def test_two(part):
    \"\"\"The part answers again.\"\"\"
    assert part.answer == 42

@requirement("CW-003")
def test_three(part):
    \"\"\"The part keeps answering.\"\"\"
    assert part.answer == 42
"""
ONE_CASE = """
import pytest
from torchparts_conformance import requirement

@requirement("CW-001")
def test_one(part):
    {body}
"""
CASE_TWO = """
@requirement("CW-002")
def test_two(part):
    assert part.answer == 42
"""


class Suite:
    """A small suite in a folder, that can be frozen and run."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.root = Path(pytester.path)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setattr(_registry, "SPEC", self.root / "spec")
        monkeypatch.setattr(_manifest.load_manifest, "__defaults__", (self.root / "lock.json",))
        monkeypatch.setattr(_manifest.file_fingerprints, "__defaults__", (self.root,))
        self.write("spec/ckpt_wrap.toml", SPEC)
        self.write("adapter.py", ADAPTER)
        self.write("cases/ckpt_wrap/test_cases.py", CASES)
        pytester.syspathinsert()

    def write(self, name: str, text: str) -> None:
        """Write a file of the suite."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")

    def write_case(self, body: str, *, and_two: bool = False) -> None:
        """Write a case of CW-001 that does something, and maybe a right one of CW-002, over all."""
        rest = CASE_TWO if and_two else ""
        self.write("cases/ckpt_wrap/test_cases.py", ONE_CASE.format(body=body) + rest)

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
