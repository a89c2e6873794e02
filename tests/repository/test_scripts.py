"""The scripts for isolation and releases detect the problems that they check for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "tools/release"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RELEASE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch, os", []),
        ("from . import sibling", []),
        ("import numpy", ["x.py:1 imports numpy"]),
        ("import rich", ["x.py:1 imports rich"]),
        ("def f():\n    import rich", []),
        ("def f():\n    import numpy", ["x.py:2 imports numpy"]),
    ],
)
def test_foreign_imports_are_named(tmp_path, source, found):
    """Only torch may be imported at the top, extras inside functions, nothing else."""
    (tmp_path / "x.py").write_text(source)
    isolation = load("isolation")
    assert list(isolation.foreign_imports(tmp_path / "x.py", {"torch"}, {"rich"})) == found


def test_files_that_the_sdist_loses_are_named(tmp_path):
    """Two wheels with the same files pass; a file in one of them only is reported."""
    (tmp_path / "direct").mkdir()
    for folder, names in ((tmp_path, ["a.py"]), (tmp_path / "direct", ["a.py", "b.toml"])):
        with zipfile.ZipFile(folder / "x-1-py3-none-any.whl", "w") as wheel:
            for name in names:
                wheel.writestr(name, "")
    found = list(load("isolation").lost_files(tmp_path))
    assert found == ["b.toml is in the wheel of the folder alone"]


PROBE = """
import sys
sys.path.insert(0, {root!r})
import nox, noxfile  # noqa: E401

nox.registry._REGISTRY.clear()

@nox.session
def probe(session):
    session.install("torchparts-probe")
    session.run("python", "-c", "import torchparts_probe")
"""


@pytest.mark.parametrize("backend", ["uv", "venv"])
def test_packages_are_found_where_pip_is_told_to_look(tmp_path, backend):
    """An index that is a folder, listed after an empty one: pip and uv both install from it."""
    index, empty = tmp_path / "index", tmp_path / "empty"
    index.mkdir()
    empty.mkdir()
    about = "torchparts_probe-1.dist-info"
    with zipfile.ZipFile(index / "torchparts_probe-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torchparts_probe.py", "")
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: torchparts-probe\nVersion: 1\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    (tmp_path / "noxfile.py").write_text(PROBE.format(root=str(ROOT)))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))
    }
    told = {"PIP_FIND_LINKS": f"{empty} {index}", "PIP_NO_INDEX": "1", "UV_NO_INDEX": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nox", "-f", "noxfile.py", "-db", backend, "-s", "probe"],
        cwd=tmp_path,
        env=kept | told,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the script of the default checks."""
    spec = importlib.util.spec_from_file_location("checks", ROOT / "tools/checks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "checks", module)  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


WAITS = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
while len(list(folder.iterdir())) < 2:
    time.sleep(0.05)
print("long ran")
sys.exit(int(sys.argv[2]))
"""
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1], sys.argv[2]).touch(); print(sys.argv[2])"


@pytest.mark.parametrize("fails", [None, "long", "one"])
def test_checks_run_in_two_lanes_and_failures_are_named(checks, tmp_path, capsys, fails):
    """A lane takes the remaining checks while the other is busy; all run in any case."""
    fail = "; sys.exit(3)" if fails == "one" else ""
    chosen = [
        checks.Check("long", ("-c", WAITS, str(tmp_path), "3" if fails == "long" else "0")),
        checks.Check("one", ("-c", WRITES + fail, str(tmp_path), "one ran")),
        checks.Check("two", ("-c", WRITES, str(tmp_path), "two ran")),
    ]
    assert checks.run(chosen) == (1 if fails else 0)
    printed = capsys.readouterr().out.splitlines()
    for name in ("long", "one", "two"):
        assert f"{name} ran" in printed
    wanted = [f"failed: {fails}  (nox -s tests -- {fails})"] if fails else []
    assert [line for line in printed if line.startswith("failed:")] == wanted


def test_wrong_name_of_a_check_is_an_error(checks, capsys):
    """Options of a command need one named check."""
    with pytest.raises(SystemExit):
        checks.main(["flat_param"])
    assert "no check is named flat_param; there are sac-policies, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        checks.main(["flat-param", "types", "--", "-x"])
    assert "options after -- go to one check" in capsys.readouterr().err


def test_release_tag_must_equal_the_version(tmp_path):
    """A wrong tag, a stale __version__ and an undated changelog are each reported."""
    package = tmp_path / "src/thing"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('version = "1.2.0"\n')
    (package / "__init__.py").write_text('__version__ = "1.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.0 - unreleased\n")
    release = load("release_tag")
    assert len(list(release.problems(tmp_path, "thing", "thing-v1.3.0"))) == 3
    (package / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.0 - 2026-11-21\n")
    assert list(release.problems(tmp_path, "thing", "thing-v1.2.0")) == []


def test_release_fails_while_a_page_says_that_nothing_is_uploaded(tmp_path):
    """The sentence stands once, in the README, and is taken out for the first release."""
    release = load("release_tag")
    assert [line.split()[0] for line in release.unfinished(ROOT)] in ([], ["README.md"])
    (tmp_path / "README.md").write_text(f"{release.NOT_UPLOADED}: clone it.")
    assert len(list(release.unfinished(tmp_path))) == 1
    (tmp_path / "README.md").write_text("Install it.")
    assert list(release.unfinished(tmp_path)) == []


def test_address_of_the_repository_is_the_same_everywhere(tmp_path):
    """One command moves it; a line that names another one is reported."""
    script = load("address")
    assert script.differences() == []
    (tmp_path / "CITATION.cff").write_text("repository-code: https://example.org/a/torchparts\n")
    (tmp_path / "page.md").write_text("see\nhttps://example.org/b/torchparts/blob/main/x\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert [line.split()[0] for line in script.differences(tmp_path)] == ["page.md:2"]
    (tmp_path / "page.md").write_text("https://example.org/a/torchparts/blob/main/x\n")
    script.move("https://example.org/c/torchparts", tmp_path)
    assert script.address(tmp_path) == "https://example.org/c/torchparts"
    assert "/c/torchparts/blob" in (tmp_path / "page.md").read_text()


def test_builds_must_be_equal(tmp_path):
    """A file that differs or is missing is reported; an empty folder is not a build."""
    for folder, text in (("one", "a"), ("other", "a")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.whl").write_text(text)
    differing = load("release_tag").differing
    one, other = tmp_path / "one", tmp_path / "other"
    assert list(differing(one, other)) == []
    (other / "x.whl").write_text("b")
    (one / "y.tar.gz").write_text("")
    assert [line.split()[0] for line in differing(one, other)] == ["x.whl", "y.tar.gz"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert list(differing(empty, empty)) == [f"{empty} has no files that were built"]


def test_simulated_device_runs_where_code_for_devices_changed(tmp_path):
    """Files that use streams or the accelerator, deleted ones, and the device itself."""
    spec = importlib.util.spec_from_file_location("concerned", ROOT / "tools/simdev/concerned.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    files = {
        "packages/x/src/a.py": "stream.wait_event(event)",
        "packages/x/src/b.py": "x = 1",
        "packages/x/tests/c.py": "@pytest.mark.accelerator",
        "packages/x/benchmarks/d.py": "torch.accelerator.synchronize()",
        "docs/page.md": "stream",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    changed = [*files, "packages/x/src/gone.py", "tools/simdev/csrc/host.cpp"]
    assert script.concerned(changed, tmp_path) == [
        *("packages/x/src/a.py", "packages/x/tests/c.py"),
        *("packages/x/src/gone.py", "tools/simdev/csrc/host.cpp"),
    ]
