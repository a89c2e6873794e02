"""Bytes reach the disk while others are written, and an error of the disk is not lost."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flat_param.dcp import _early_sync
from flat_param.dcp._early_sync import EVERY_BYTES, EarlySync


@pytest.fixture
def syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EarlySync, list[str]]]:
    """A file's, and the threads that have synced it."""
    threads: list[str] = []
    monkeypatch.setattr(
        _early_sync, "_sync", lambda _: threads.append(threading.current_thread().name)
    )
    with (tmp_path / "data").open("xb") as file:
        yield EarlySync(file), threads


def test_small_file_is_left_to_the_last_sync(syncs: tuple[EarlySync, list[str]]) -> None:
    """No thread is started for it."""
    early, threads = syncs
    before = threading.active_count()
    early.written(EVERY_BYTES - 1)
    assert threading.active_count() == before
    early.close()
    assert threads == []


def test_large_file_is_synced_in_a_thread(syncs: tuple[EarlySync, list[str]]) -> None:
    """Once for each 16 MiB if there is time for it, and nothing goes on when it is closed."""
    early, threads = syncs
    before = threading.active_count()
    for end in range(0, 8 * EVERY_BYTES, EVERY_BYTES // 4):
        early.written(end)
        for _ in range(6000):  # until the thread has done what it was asked for
            if len(threads) >= end // EVERY_BYTES and not early._wanted.is_set():
                break
            time.sleep(0.01)
    early.close()
    assert threading.active_count() == before
    assert len(threads) == 7
    assert all(name.startswith("sync ") for name in threads)


def test_closing_while_a_sync_begins_ends(syncs: tuple[EarlySync, list[str]]) -> None:
    """The thread has seen that something is wanted, and is about to take that back."""
    early, _ = syncs
    take_back = early._wanted.clear

    def closed_meanwhile() -> None:
        early._over = True
        early._wanted.set()
        take_back()

    early._wanted.clear = closed_meanwhile  # type: ignore[method-assign]
    early.written(EVERY_BYTES)
    assert early._thread is not None
    early._thread.join(20)
    assert not early._thread.is_alive()


def test_error_of_the_disk_is_raised_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would not tell the next sync of it."""

    called = threading.Event()

    def fails(_: int) -> None:
        called.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_early_sync, "_sync", fails)
    with (tmp_path / "data").open("xb") as file:
        early = EarlySync(file)
        early.written(EVERY_BYTES)
        assert called.wait(60)
        with pytest.raises(OSError, match="Input/output error"):
            early.close()


def test_closing_waits_for_the_sync_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends once it is waited for, and no sooner."""
    waited_for, synced = threading.Event(), []

    class Waiting(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            waited_for.set()
            super().join(timeout)

    fakes = SimpleNamespace(Thread=Waiting, Event=threading.Event)
    monkeypatch.setattr(_early_sync, "threading", fakes)
    monkeypatch.setattr(_early_sync, "_sync", lambda _: synced.append(waited_for.wait(30)))
    try:
        with (tmp_path / "data").open("xb") as file:
            early = EarlySync(file)
            early.written(EVERY_BYTES)
            while early._wanted.is_set():  # until it is under way
                time.sleep(0.001)
            early.close()
            assert synced == [True]
    finally:
        waited_for.set()
