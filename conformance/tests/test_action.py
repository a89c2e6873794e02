"""The GitHub action: it passes its inputs to the suite and returns the suite's exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ACTION = Path(__file__).parents[1] / "action.yml"


@pytest.fixture(scope="module")
def script():
    """Return the commands that run the suite."""
    (block,) = re.findall(r"    - run: \|\n(.*?)\n      shell:", ACTION.read_text("utf-8"), re.S)
    return textwrap.dedent(block)


@pytest.fixture
def ended(script, tmp_path):
    """Return a function that runs the commands with a fake suite."""
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nexec {sys.executable} "{tmp_path}/suite.py" "$@"\n', encoding="utf-8"
    )
    (tmp_path / "python").chmod(0o755)

    def run(suite, **inputs):
        (tmp_path / "suite.py").write_text(suite, encoding="utf-8")
        words = {"IMPL": "mine", "AREA": "mod-tracker", "PROFILE": "core", "DEVICE": "cpu"}
        words |= {"KNOWN_FAILURES": "", "OUT": "out", **inputs}
        words["GITHUB_STEP_SUMMARY"] = str(tmp_path / "summary.md")
        words["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**os.environ, **words},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


SAYS = "import sys; print(sys.argv[1:])"
FAILS = """
import pathlib
pathlib.Path("out").mkdir()
pathlib.Path("out/summary.txt").write_text("all passed")
raise SystemExit(1)
"""


def test_inputs_become_options_word_by_word(ended):
    """Spaces and quotes in an input are kept; without known failures there is no option."""
    asked = ["-m", "torchparts_conformance", "run", "--impl", "a b'$HOME", "--area", "mod-tracker"]
    asked += ["--profile", "core", "--device", "cpu", "--out", "out"]
    found = ended(SAYS, IMPL="a b'$HOME")
    assert (found.returncode, found.stdout) == (0, f"{asked}\n")
    found = ended(SAYS, IMPL="a b'$HOME", KNOWN_FAILURES="known failures.toml")
    assert found.stdout == f"{[*asked, '--known-failures', 'known failures.toml']}\n"


def test_failed_run_fails_and_is_shown(ended, tmp_path):
    """It returns the suite's exit code and adds its summary to the run's page."""
    assert ended(FAILS).returncode == 1
    assert (tmp_path / "summary.md").read_text() == "```\nall passed```\n"


def test_every_input_is_used_and_none_is_put_into_a_command():
    """A caller's input reaches the shell only in variables."""
    text = ACTION.read_text("utf-8")
    inputs, _, steps = text.partition("runs:")
    names = re.findall(r"^  ([\w-]+):$", inputs.partition("inputs:")[2], re.M)
    used = re.findall(r"^ {8}\w+: \$\{\{ inputs\.([\w-]+) \}\}$", steps, re.M)
    assert sorted(names) == sorted(used)
    assert steps.count("${{") == len(used)
