"""Tasks are carried out behind who asks for them, and a file reaches the disk as it is written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flat_param.dcp import _behind
from flat_param.dcp._behind import EVERY_BYTES, Behind, EarlySync


def test_tasks_are_carried_out_in_order_in_one_thread() -> None:
    """And nothing goes on when it is closed."""
    before, found = threading.active_count(), list[tuple[int, str]]()
    behind = Behind("a helper")
    for number in range(5):
        behind.do(lambda n=number: found.append((n, threading.current_thread().name)))
    behind.wait()
    assert found == [(number, "a helper") for number in range(5)]
    behind.close()
    assert threading.active_count() == before


def test_without_tasks_there_is_no_thread() -> None:
    """Waiting and closing are no reason for one."""
    before, behind = threading.active_count(), Behind("a helper")
    behind.wait()
    assert threading.active_count() == before
    behind.close()


def test_waiting_ends_when_the_task_under_way_has() -> None:
    """Not before."""
    behind, goes_on, done = Behind("a helper"), threading.Event(), list[str]()

    def task() -> None:
        goes_on.wait(60)
        done.append("the task")

    behind.do(task)
    threading.Timer(0.05, goes_on.set).start()
    behind.wait()
    assert done == ["the task"]
    behind.close()


def test_error_is_raised_where_it_is_waited_for() -> None:
    """What comes after it is not carried out."""
    behind, found = Behind("a helper"), list[int]()

    def fails() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    behind.do(fails)
    behind.do(lambda: found.append(1))
    with pytest.raises(OSError, match="Input/output error"):
        behind.wait()
    behind.close()
    assert not found


def test_closing_leaves_what_has_not_begun() -> None:
    """The caller has failed: its file will be removed. It waits for the task under way."""
    behind, found = Behind("a helper"), list[str]()
    begun, goes_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        goes_on.wait(60)
        found.append("first")

    behind.do(first)
    behind.do(lambda: found.append("second"))
    assert begun.wait(60)
    threading.Timer(0.05, goes_on.set).start()
    behind.close()
    assert found == ["first"]


def test_process_that_is_ending_does_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts no thread any more; an error is raised at the same place."""

    def none(_: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", none)
    behind, found = Behind("a helper"), list[str]()
    behind.do(lambda: found.append(threading.current_thread().name))
    behind.do(lambda: found.append(threading.current_thread().name))
    behind.wait()
    assert found == [threading.main_thread().name] * 2
    behind.do(lambda: found.index("no such thing"))
    with pytest.raises(ValueError, match="no such thing"):
        behind.wait()
    behind.close()


def test_thread_that_ctrl_c_came_to_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts after its file was closed, whose number another one may have."""
    start, late, found = threading.Thread.start, list[threading.Thread](), list[int]()

    def interrupted(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    behind = Behind("a helper")
    with pytest.raises(KeyboardInterrupt):
        behind.do(lambda: found.append(1))
    behind.close()
    start(late[0])
    late[0].join(60)
    assert not late[0].is_alive()
    assert not found


Begin = Callable[[int, int, int, int], int]


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Files that were synced, each time."""
    found: list[int] = []
    monkeypatch.setattr(_behind, "_sync", found.append)
    return found


def test_linux_begins_with_what_is_new(
    tmp_path: Path, syncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is waited for, and nothing asked for twice."""
    asked: list[tuple[int, int]] = []

    def begin(_: int, start: int, length: int, __: int) -> int:
        asked.append((start, length))
        return 0

    monkeypatch.setattr(_behind, "_begin_writing", lambda: begin)
    with (tmp_path / "data").open("xb") as file:
        early = EarlySync(file)
        for stop in (10, 25, EVERY_BYTES * 2):
            early.until(stop)
    assert asked == [(0, 10), (10, 15), (25, EVERY_BYTES * 2 - 25)]
    assert not syncs


@pytest.mark.parametrize("begin", [None, lambda *_: -1], ids=["there is none", "it refuses"])
def test_elsewhere_large_files_are_synced_now_and_then(
    tmp_path: Path, syncs: list[int], monkeypatch: pytest.MonkeyPatch, begin: Begin | None
) -> None:
    """Once for each 16 MiB, and a small one not at all."""
    monkeypatch.setattr(_behind, "_begin_writing", lambda: begin)
    with (tmp_path / "data").open("xb") as file:
        early = EarlySync(file)
        early.until(EVERY_BYTES - 1)
        assert not syncs
        for stop in range(0, 4 * EVERY_BYTES + 1, EVERY_BYTES // 4):
            early.until(stop)
        assert syncs == [file.fileno()] * 4


def test_linux_has_the_function(tmp_path: Path) -> None:
    """It takes what it is given; a file that is none is refused."""
    begin = _behind._begin_writing()
    if begin is None:
        pytest.skip("not on this system")
    with (tmp_path / "data").open("xb", buffering=0) as file:
        file.write(bytes(1 << 20))
        assert begin(file.fileno(), 0, 1 << 20, _behind._WRITE) == 0
    assert begin(-1, 0, 1, _behind._WRITE) == -1
