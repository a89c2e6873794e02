"""A file is read ahead of its reader, not too far, and by nobody once it is closed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from flat_param.dcp import _read_ahead
from flat_param.dcp._read_ahead import ReadAhead

BLOCK = _read_ahead._BLOCK_BYTES


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The last byte of each block that the thread has come to; none is in memory."""
    found: list[int] = []

    def note(_: object, at: int) -> bool:
        found.append(at)
        return False

    monkeypatch.setattr(_read_ahead, "_is_in_memory", note)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 16 blocks."""
    file = tmp_path / "data"
    file.write_bytes(bytes(16 * BLOCK))
    return file


def _wait(thread: threading.Thread | None) -> None:
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_what_is_wanted_is_read(path: Path, looked_at: list[int]) -> None:
    """From the first byte to the last, and not the rest of the file."""
    ahead = ReadAhead(path)
    ahead.start(BLOCK, 9 * BLOCK - 10)
    _wait(ahead._thread)
    ahead.close()
    assert looked_at == [*range(2 * BLOCK - 1, 9 * BLOCK - 1, BLOCK), 9 * BLOCK - 11]


def test_a_little_is_not_worth_a_thread(path: Path) -> None:
    """Its reader has it as soon."""
    ahead, before = ReadAhead(path), threading.active_count()
    ahead.start(0, 4 * BLOCK - 1)
    assert threading.active_count() == before
    ahead.close()


def test_it_waits_for_its_reader(
    path: Path, looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read far ahead would be gone from the system's memory when it is wanted."""
    monkeypatch.setattr(_read_ahead, "AHEAD_BYTES", 2 * BLOCK)
    ahead, waits = ReadAhead(path), threading.Event()
    wait_for = ahead._moved.wait_for

    def noted(ready: object) -> bool:
        if not ready():  # type: ignore[operator]
            waits.set()
        return wait_for(ready)  # type: ignore[arg-type]

    ahead._moved.wait_for = noted  # type: ignore[method-assign,assignment]
    ahead.start(0, 16 * BLOCK)
    assert waits.wait(60)
    assert len(looked_at) == 2
    ahead.move(16 * BLOCK)
    _wait(ahead._thread)
    assert len(looked_at) == 16
    ahead.close()


def test_closing_ends_the_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it waits for a reader that has failed."""
    monkeypatch.setattr(_read_ahead, "AHEAD_BYTES", BLOCK)
    before = threading.active_count()
    ahead = ReadAhead(path)
    ahead.start(0, 16 * BLOCK)
    ahead.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("wrong", ["no file", "shorter"])
def test_what_goes_wrong_is_the_readers(tmp_path: Path, wrong: str) -> None:
    """Who reads the file says what is wrong with it; nothing is written to stderr here."""
    file = tmp_path / "data"
    if wrong == "shorter":
        file.write_bytes(bytes(3 * BLOCK))
    errors: list[object] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        ahead = ReadAhead(file)
        ahead.start(0, 64 * BLOCK)
        _wait(ahead._thread)
        ahead.close()
    finally:
        threading.excepthook = hook
    assert not errors


def test_process_without_more_threads_reads_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is ending."""

    def none(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    ahead = ReadAhead(path)
    ahead.start(0, 16 * BLOCK)
    ahead.close()


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell")
def test_what_is_in_memory_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was just written, and is asked for only."""
    with path.open("rb", buffering=0) as file:
        file.read()
        assert _read_ahead._is_in_memory(file, 5 * BLOCK)
        monkeypatch.setattr(os, "preadv", _raises)
        assert not _read_ahead._is_in_memory(file, 5 * BLOCK)
        monkeypatch.delattr(os, "RWF_NOWAIT")
        assert not _read_ahead._is_in_memory(file, 5 * BLOCK)


def _raises(*_: object) -> int:
    raise BlockingIOError
