"""The thread of an asynchronous save: what it saves, whom it tells, and who waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flat_param import CheckpointError
from flat_param.checkpoint import _writer
from flat_param.checkpoint._writer import start, wait_for_last

from ._claims import all_are_listed, holds_on_every_rank

CLAIMS = (
    "child_has_nothing_under_way",
    "error_of_one_rank_is_in_every_future",
    "error_that_nobody_asked_for_is_told_by_the_next_save",
    "group_without_a_store_is_refused",
    "lone_call_is_not_joined_by_a_later_step",
    "next_save_waits",
    "rank_that_does_not_come_is_named",
    "steps_go_on_while_bytes_leave",
)


@pytest.fixture(scope="module", params=[2, 4])
def results(
    request: pytest.FixtureRequest,
    ranks: Callable[..., list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, str]]:
    """All checks of workers/async_save.py, run once on two and once on four ranks."""
    folder = str(tmp_path_factory.mktemp("saves"))
    return ranks(request.param, "async_save", folder, timeout_s=120)


test_claim_holds_on_every_rank = holds_on_every_rank(CLAIMS)
test_every_check_is_listed = all_are_listed(CLAIMS)


@pytest.mark.dist
@pytest.mark.slow
def test_rank_killed_while_bytes_leave_spoils_nothing(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """The other's future names what happened, and the checkpoint before is whole."""
    first, killed = ranks(2, "killed_async_save", str(tmp_path / "saved"), killed=(1,))
    assert killed is None
    assert "did not answer within" in first["error"]
    assert ranks(1, "read_back", str(tmp_path / "saved"), "after the kill") == [[1.0]]


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
    future = start(lambda: True, "there")
    assert not future.cancel()
    assert future.result() is True
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
