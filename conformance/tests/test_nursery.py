"""A child of the nursery does what a Python of its own would, and leaves nothing to the next."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

Nursery = runpy.run_path(str(Path(__file__).with_name("nursery.py")))["Nursery"]


@pytest.fixture(scope="module")
def nursery():
    """Give one that has imported `json`, and knows it."""
    found = Nursery("-c", "import json; json.began = 1")
    yield found
    found.close()


@pytest.fixture
def said(tmp_path):
    """Give the file for what is printed."""
    return tmp_path / "said"


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import sys; print(sys.argv[1:], __name__)", 0, "['a'] __main__"),
        ("import json; print(json.began)", 0, "1"),
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)
def test_code_and_script_end_as_in_a_python_of_their_own(
    nursery, said, tmp_path, code, status, words
):
    """With their arguments, exit status and what they print."""
    script = tmp_path / "script.py"
    script.write_text(code)
    for arguments in (["-c", code, "a"], [str(script), "a"]):
        assert nursery.run(*arguments, said=said) == status
        assert words in said.read_text()
        said.unlink()


def test_module_is_run_by_its_name(nursery, said):
    """With what is for it."""
    assert nursery.run("-m", "json.tool", "--help", said=said) == 0
    assert said.read_text().startswith("usage: ")


def test_what_waits_for_the_end_is_done(nursery, said):
    """As when an interpreter ends."""
    assert nursery.run("-c", "import atexit; atexit.register(print, 'ended')", said=said) == 0
    assert said.read_text() == "ended\n"


def test_children_share_nothing(nursery, said):
    """What one does to a module the next does not see."""
    assert nursery.run("-c", "import json; json.began = 2", said=said) == 0
    assert nursery.run("-c", "import json; assert json.began == 1", said=said) == 0


def test_child_that_does_not_end_is_killed(nursery, said):
    """And the next is served."""
    assert nursery.run("-c", "import time; time.sleep(60)", said=said, timeout_s=0.1) == -9
    assert nursery.run("-c", "pass", said=said) == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="cannot see threads here")
def test_no_child_is_forked_beside_a_thread(said, capfd):
    """It would be gone in the child, with whatever it holds."""
    late = "import threading, time; threading.Thread(target=time.sleep, args=(1,)).start()"
    nursery = Nursery("-c", late)
    with pytest.raises(AssertionError, match="the nursery has ended"):
        nursery.run("-c", "pass", said=said)
    nursery.close()
    assert "but a fork has only one thread" in capfd.readouterr().err
