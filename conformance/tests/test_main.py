"""A command that judges starts again where nothing is found but the judge; others do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Python imports this by itself, before anything of the suite: whatever is printed is success.
HELPFUL = """
import builtins, os
builtins.print = lambda *words, **options: os._exit(0)
"""


def _ended(folder, *arguments):
    command = [sys.executable, "-m", "torchparts_conformance", *arguments]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--impl=ours", "--area=wheels"],
        ["verify", "none.json"],
    ],
)
def test_what_python_imports_by_itself_is_not_there_when_a_verdict_is_given(tmp_path, arguments):
    """The command ends as it should, whatever a `sitecustomize` does."""
    (tmp_path / "sitecustomize.py").write_text(HELPFUL)
    ended = _ended(tmp_path, *arguments)
    assert ended.returncode == 4
    assert ended.stderr.startswith("torchparts-conformance: ")


def test_command_that_judges_nothing_runs_where_it_was_started(tmp_path):
    """It finds what the user's own Python finds."""
    (tmp_path / "sitecustomize.py").write_text(HELPFUL)
    ended = _ended(tmp_path, "diff", "none.json", "none.json")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_exit_code_and_words_of_a_command_are_passed_on(tmp_path):
    """With its arguments, word by word."""
    ended = _ended(tmp_path, "verify", "a b.json")
    assert ended.returncode == 4
    assert "report 'a b.json' cannot be read" in ended.stderr
