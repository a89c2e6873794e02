"""A wrong implementation stays wrong, whatever it does to the process that it is run in."""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchparts_conformance._package import PACKAGE
from torchparts_conformance.render import _render
from torchparts_conformance.report import _report

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]  # a fixture runs all attacks
AT_A_TIME = 4
attacks = types.SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("attacks.py"))))
RIGHT = "a right implementation"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Give a folder with this suite's code and two requirements of its own."""
    root = tmp_path_factory.mktemp("small")
    package = root / "torchparts_conformance"
    left_out = shutil.ignore_patterns("__pycache__", "*.toml", "test_*")
    shutil.copytree(PACKAGE, package, ignore=left_out)
    _render.write(package / "source_tests.toml", "")
    _render.write(package / "cases" / "ckpt_wrap" / "test_cases.py", attacks.CASES)
    return root


def _environment(*folders):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture(scope="module")
def ended(request, small, tmp_path_factory):
    """Run every attack that was selected; gives how each command ended and its folder, by name."""
    wanted = {name: {"attack.py": attacks.ADAPTER + code} for name, code in attacks.CODE.items()}
    for name, files in attacks.FILES.items():
        wanted[name] = {"attack.py": attacks.ADAPTER, **files}
    wanted[RIGHT] = {"attack.py": attacks.ADAPTER.replace("41", "42")}

    def run(name):
        folder = tmp_path_factory.mktemp("attack")
        for path, text in wanted[name].items():
            _render.write(folder / path, text)
        command = ["-m", "torchparts_conformance", "run", "--impl", "attack:impl", "--out", "out"]
        found = subprocess.run(
            [sys.executable, *command, "--area", "ckpt-wrap"],
            cwd=folder,
            env=_environment(folder, small),
            capture_output=True,
            text=True,
            timeout=600,
        )
        (folder / "over").touch()
        return found, folder

    selected = [vars(item).get("callspec") for item in request.session.items]
    names = [RIGHT, *(found.params["name"] for found in selected if found and _is_attack(found))]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


@pytest.mark.parametrize("name", [*attacks.CODE, *attacks.FILES])
def test_attacks_reach_for_names_that_are_there(name):
    """An attack that fails at an import of its own would prove nothing."""
    files = {"attack.py": attacks.CODE[name]} if name in attacks.CODE else attacks.FILES[name]
    wanted = [
        (node.module, alias.name)
        for path, text in files.items()
        if path.endswith(".py")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchparts_")
        for alias in node.names
        if alias.name != "*"
    ]
    for module, reached in wanted:
        if not hasattr(importlib.import_module(module), reached):
            assert importlib.import_module(f"{module}.{reached}")


def _is_attack(selected):
    return selected.params.get("name") in {*attacks.CODE, *attacks.FILES}


def test_right_implementation_is_conformant(ended):
    """The small suite can be passed, so that what fails below is the attack."""
    found, folder = ended[RIGHT]
    assert found.returncode == 0, found.stderr
    assert _report.read(folder / "out" / "report.json")["verdict"] == "conformant"
    assert "brightgreen" in (folder / "out" / "badge-ckpt-wrap.json").read_text()


@pytest.mark.parametrize("name", [*attacks.CODE, *attacks.FILES])
def test_wrong_implementation_gets_no_badge(ended, name):
    """Exit code 1, no report that says otherwise, and no green badge."""
    found, folder = ended[name]
    assert found.returncode == 1, found.stdout + found.stderr
    report = folder / "out" / "report.json"
    assert not report.exists() or _report.read(report)["verdict"] == "not conformant"
    badge = folder / "out" / "badge-ckpt-wrap.json"
    assert not badge.exists() or "brightgreen" not in badge.read_text()
