"""The first lines of an isolated process: what it may find is handed over, folder by folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from torchparts_conformance.subject import _isolation

MODULE = """
import json, sys
from torchparts_conformance.subject import _isolation

def main():
    facts = {"argv": sys.argv, "path": sys.path, "prefixes": [sys.prefix, sys.exec_prefix]}
    facts["subject"] = _isolation.paths().subject
    print(json.dumps({**facts, "is_isolated": _isolation.is_isolated()}))
    return 7
"""


@pytest.fixture
def booted(tmp_path):
    """Give what a module says that is called in such a process, and how the process ended."""
    (tmp_path / "called_at_boot.py").write_text(MODULE)
    handed = {
        "module": "called_at_boot",
        "judge": [str(tmp_path), *_isolation.paths().judge],
        "subject": ["/nowhere/theirs"],
        "sites": [],
        "prefixes": ["/one", "/two"],
    }
    command = [sys.executable, "-I", "-S", str(_isolation.BOOT), json.dumps(handed), "run", "--x"]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": "/nowhere/variable"},
        cwd=tmp_path,
    )
    assert ended.stderr == ""
    return json.loads(ended.stdout), ended.returncode


def test_main_of_the_module_gives_the_exit_code(booted):
    """What it returns is how the process ends."""
    assert booted[1] == 7


def test_module_sees_its_own_arguments(booted):
    """Behind its name; what was handed over is not among them."""
    assert booted[0]["argv"] == ["called_at_boot", "run", "--x"]


def test_folders_of_the_judge_come_behind_the_standard_library(booted, tmp_path):
    """And neither `PYTHONPATH` nor the subject's folders are there."""
    path = booted[0]["path"]
    judge = [str(tmp_path), *_isolation.paths().judge]
    assert path[-len(judge) :] == judge
    assert len(path) > len(judge)
    assert not {"/nowhere/theirs", "/nowhere/variable"} & set(path)


def test_process_knows_its_environment_and_that_it_is_isolated(booted):
    """So that it can let the subject's code in later, and can start others like itself."""
    assert booted[0]["prefixes"] == ["/one", "/two"]
    assert booted[0]["subject"] == ["/nowhere/theirs"]
    assert booted[0]["is_isolated"] is True
