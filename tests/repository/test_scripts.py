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
FOLDERS = [*sorted((ROOT / "packages").iterdir()), ROOT / "conformance"]


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


LANES = """
import pathlib
import time

import nox

@nox.session(venv_backend="none")
@nox.parametrize("part", ["one", "two"], ids=["one", "two"])
def tests(session, part):
    print(f"tests({{part}}) ran", flush=True)
    if f"tests({{part}})" == "{fails}":
        session.error()

@nox.session(venv_backend="none")
def repository(session):
    for _ in range(300):  # until the other lane has run all that is left
        if len(list(pathlib.Path().glob("report-tests*"))) == 2:
            break
        time.sleep(0.1)
    else:
        session.error()
    print("repository ran", flush=True)
    if "{fails}" == "repository":
        session.error()
"""


@pytest.mark.parametrize("fails", ["", "tests(one)", "tests(two)", "repository"])
def test_failure_in_either_lane_is_one(tmp_path, fails):
    """Each lane takes remaining sessions while the other is busy; only failures are named."""
    (tmp_path / "noxfile.py").write_text(LANES.format(fails=fails))
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci/lanes.py"), str(tmp_path / "log")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (1 if fails else 0), done.stderr
    for name in ("tests(one)", "tests(two)", "repository"):
        assert f"{name} ran" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("failed:")] == (
        [f'failed: {fails}  (python -m nox -s "{fails}")'] if fails else []
    )


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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_versions_agree(folder):
    """hatchling's version equals the package's `__version__`."""
    version = load("release_tag").static_version(folder)
    (init,) = folder.glob("src/*/__init__.py")
    assert f'__version__ = "{version}"' in init.read_text(encoding="utf-8")


@pytest.mark.parametrize(("told", "given"), [("3", "3"), (None, str(os.cpu_count() or 1))])
def test_demo_runs_on_as_many_threads_as_it_is_told(told, given):
    """`OMP_NUM_THREADS` if set, else all processors; other sessions use one."""
    code = (
        "import os, noxfile\n"
        "class Session:\n"
        "    posargs = ()\n"
        "    def install(self, *names): pass\n"
        "    def run(self, *command, env): print(env['OMP_NUM_THREADS'])\n"
        "noxfile.demo.func(Session())\n"
        "print(os.environ['OMP_NUM_THREADS'])"
    )
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": told} if told else {}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout.split() == [given, told or "1"], done.stderr
