"""The thread of an asynchronous save: what it saves, whom it tells, and who waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from flat_param import CheckpointError
from flat_param.checkpoint import _writer
from flat_param.checkpoint._writer import start, wait_for_last


@pytest.fixture
def nothing_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No save of another test is remembered, nor one of this test by others."""
    monkeypatch.setattr(_writer, "_last", None)
    yield
    monkeypatch.setattr(_writer, "_last", None)


@pytest.mark.usefixtures("nothing_before")
def test_next_save_waits_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one ends once it is waited for, and no sooner."""
    waited_for, real = threading.Event(), _writer.wait
    monkeypatch.setattr(_writer, "wait", lambda saves: (waited_for.set(), real(saves)))
    future = start(lambda: waited_for.wait(30), "there")
    try:
        wait_for_last()
        assert future.done()
    finally:
        waited_for.set()
        future.result()


def _fails() -> bool:
    raise OSError("the disk is gone")


@pytest.mark.usefixtures("nothing_before")
def test_error_is_told_once() -> None:
    """By the next save where nobody has asked, and not again."""
    wait_for_last()
    start(_fails, "there")
    with pytest.raises(CheckpointError) as raised:
        wait_for_last()
    assert str(raised.value) == (
        "flat_param.save_sharded: the asynchronous save to 'there' before this one has failed, "
        "but its future was never asked for the result. Nothing is saved by this call; correct "
        "the error and save again: the disk is gone"
    )
    wait_for_last()


@pytest.mark.usefixtures("nothing_before")
@pytest.mark.parametrize("ask", ["result", "exception"])
def test_error_that_was_asked_for_is_not_told_again(ask: str) -> None:
    """The future has said it."""
    future = start(_fails, "there")
    if ask == "exception":
        assert isinstance(future.exception(), OSError)
    else:
        with pytest.raises(OSError, match="the disk is gone"):
            future.result()
    wait_for_last()


@pytest.mark.usefixtures("nothing_before")
def test_save_is_not_cancelled() -> None:
    """Other ranks count on it."""
    future = start(lambda: None, "there")
    assert not future.cancel()
    assert future.result() is None
    assert future.unasked() is None


_PROGRAM = """
import sys, threading, time
from flat_param.checkpoint._writer import start

def save():
    time.sleep(0.5)
    print("written", flush=True)
    if sys.argv[1] == "fails":
        raise OSError("the disk is gone")
    return True

start(save, "there")
if sys.argv[1] == "interrupted":
    raise KeyboardInterrupt
print("over", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "fails", "interrupted"])
def test_interpreter_waits_and_tells(how: str) -> None:
    """Its end, by Ctrl-C too, comes after the save, and says what nobody has asked for."""
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, timeout=100
    )
    lines = ["written"] if how == "interrupted" else ["over", "written"]
    assert found.stdout.splitlines() == lines
    told = (
        "flat_param.async_save_sharded: the save to 'there' has failed, and its future was never "
        "asked for the result: the disk is gone\n"
    )
    assert (told in found.stderr) == (how == "fails")
    assert ("KeyboardInterrupt" in found.stderr) == (how == "interrupted")
