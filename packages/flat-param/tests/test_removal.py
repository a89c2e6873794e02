"""Folders are gone at once, and their room comes back; whatever the file system does."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flat_param.dcp import _removal
from flat_param.dcp._checkpoint import remove_leftovers
from flat_param.dcp._removal import remove_folders, wait_for_room


def _folder(path: Path, files: int = 2) -> Path:
    path.mkdir()
    for number in range(files):
        (path / f"file {number}").write_bytes(bytes(_removal._LARGE_BYTES))
    return path


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_file_is_left_open() -> Iterator[None]:
    """Each number is given back."""
    wait_for_room()
    before = _open_files()
    yield
    wait_for_room()
    assert _open_files() == before


def test_folders_are_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While their files are still closed; the next save waits for that."""
    goes_on, closed, close = threading.Event(), list[int](), os.close

    def slow(number: int) -> None:
        goes_on.wait(60)
        closed.append(number)
        close(number)

    folders = [_folder(tmp_path / "one"), _folder(tmp_path / "two", 1)]
    with monkeypatch.context() as patch:
        patch.setattr(_removal, "_close", lambda numbers: [slow(each) for each in numbers])
        remove_folders(folders)
        assert not any(folder.exists() for folder in folders)
        assert not closed
        threading.Timer(0.05, goes_on.set).start()
        wait_for_room()
        assert len(closed) == 3


@pytest.mark.parametrize("wait", ["the next save", "the last of two"])
def test_all_room_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    """By the save after it, before it looks at anything; and by who waits for a later one."""
    closed, close = list[int](), _removal._close

    def slow(numbers: Sequence[int]) -> None:
        time.sleep(0.2)
        closed.extend(numbers)
        close(numbers)

    with monkeypatch.context() as patch:
        patch.setattr(_removal, "_close", slow)
        remove_folders([_folder(tmp_path / "one")])
        if wait == "the next save":
            remove_leftovers(tmp_path)
            assert len(closed) == 2
        else:
            patch.setattr(_removal, "_close", close)
            remove_folders([_folder(tmp_path / "two")])
            wait_for_room()
            assert len(closed) == 2


def test_few_files_are_open_and_no_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process can open so many, and it is not worth it for metadata."""
    folder, closed = _folder(tmp_path / "one", 3), list[int]()
    (folder / "file 0").write_bytes(b"small")
    monkeypatch.setattr(_removal, "_MOST_FILES", 3)
    folders, close = [folder, _folder(tmp_path / "two", 4)], _removal._close
    monkeypatch.setattr(
        _removal, "_close", lambda numbers: [closed.extend(numbers), close(numbers)]
    )
    remove_folders(folders)
    wait_for_room()
    assert len(closed) == 3
    assert not any(each.exists() for each in folders)


def test_what_is_not_named_stays(tmp_path: Path) -> None:
    """And folders that are not there are no error."""
    kept = _folder(tmp_path / "kept")
    remove_folders([tmp_path / "none"])
    remove_folders([])
    assert len(list(kept.iterdir())) == 2


def test_folders_inside_go_too(tmp_path: Path) -> None:
    """Of somebody who has put one there."""
    folder = _folder(tmp_path / "one")
    _folder(folder / "inside")
    remove_folders([folder])
    assert not folder.exists()


def test_file_system_that_keeps_open_files_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS, which gives them another name: the folder goes when they are closed."""
    folder, before, remove = _folder(tmp_path / "one"), _open_files(), shutil.rmtree

    def keeps(path: Path, *, ignore_errors: bool) -> None:
        if _open_files() <= before + 1:
            remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", keeps)
    remove_folders([folder])
    assert not folder.exists()


@pytest.mark.parametrize("why", ["no thread", "no numbers", "not posix"])
def test_it_goes_without_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Where a process is ending, has too many files open, or the system is another one."""

    def refuses(*_: object) -> None:
        raise RuntimeError(why) if why == "no thread" else OSError(why)

    folder = _folder(tmp_path / "one")
    if why == "no thread":
        monkeypatch.setattr(threading.Thread, "start", refuses)
    elif why == "no numbers":
        monkeypatch.setattr(_removal.os, "open", refuses)
        monkeypatch.setattr(shutil, "rmtree", lambda path, **_: os.rename(path, f"{path} gone"))
    else:
        monkeypatch.setattr(_removal, "_opened", lambda *_: [])
    remove_folders([folder])
    assert not folder.exists()
