"""Files are read ahead of their reader, not too far, and by nobody once it is closed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from flat_param.dcp import _read_ahead
from flat_param.dcp._read_ahead import ReadAhead, Stretch

PIECE = 1 << 20
Read = tuple[str, int, int]  # name of the file, first byte, length


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """What the thread has had read, in pieces of 1 MiB."""
    found: list[Read] = []
    real = _read_ahead._read_at

    def note(file: object, at: int, length: int, nowhere: object) -> int:
        found.append((Path(file.name).name, at, length))  # type: ignore[attr-defined]
        return real(file, at, length, nowhere)  # type: ignore[arg-type]

    monkeypatch.setattr(_read_ahead, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(_read_ahead, "_read_at", note)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 16 pieces."""
    return _file(tmp_path / "data")


def _file(path: Path, pieces: int = 16) -> Path:
    path.write_bytes(bytes(pieces * PIECE))
    return path


def _pieces(path: Path, start: int, stop: int) -> list[Read]:
    return [(path.name, at * PIECE, PIECE) for at in range(start, stop)]


def _waiting(ahead: ReadAhead) -> threading.Event:
    """Set when the thread waits for anything next."""
    waits, wait_for = threading.Event(), ahead._moved.wait_for

    def noted(ready: object) -> bool:
        if not ready():  # type: ignore[operator]
            waits.set()
        return wait_for(ready)  # type: ignore[arg-type]

    ahead._moved.wait_for = noted  # type: ignore[method-assign,assignment]
    return waits


def _want(ahead: ReadAhead, *stretches: Stretch) -> None:
    """And wait until that was read."""
    waits = _waiting(ahead)
    ahead.want(stretches)
    assert waits.wait(60)


def test_what_is_wanted_is_read(path: Path, read: list[Read]) -> None:
    """From the first byte to the last, and not the rest of the file."""
    ahead = ReadAhead()
    _want(ahead, Stretch(path, PIECE, 9 * PIECE - 10))
    ahead.close()
    assert read == [*_pieces(path, 1, 8), ("data", 8 * PIECE, PIECE - 10)]


def test_files_are_read_one_after_another(path: Path, tmp_path: Path, read: list[Read]) -> None:
    """By one thread, which goes on while their reader is busy with the first."""
    ahead, other = ReadAhead(), _file(tmp_path / "other")
    _want(ahead, Stretch(path, 0, 2 * PIECE), Stretch(other, 3 * PIECE, 5 * PIECE))
    ahead.close()
    assert read == _pieces(path, 0, 2) + _pieces(other, 3, 5)


def test_positions_count_what_is_wanted(path: Path) -> None:
    """Of all calls."""
    ahead = ReadAhead()
    assert ahead.want([Stretch(path, 5, 15), Stretch(path, 20, 50)]) == 0
    assert ahead.want([Stretch(path, 60, 70)]) == 40
    ahead.close()


@pytest.mark.parametrize("start", [0, 1])
def test_what_was_guessed_is_not_read_again(path: Path, read: list[Read], start: int) -> None:
    """It is gone on from there, whether or not all of it was wanted."""
    ahead = ReadAhead()
    waits = _waiting(ahead)
    ahead.guess(Stretch(path, 0, 4 * PIECE))
    assert waits.wait(60)
    _want(ahead, Stretch(path, start * PIECE, 7 * PIECE))
    ahead.close()
    assert read == _pieces(path, 0, 7)


@pytest.mark.parametrize("start", [2, 9])
def test_wrong_guess_costs_only_itself(path: Path, read: list[Read], start: int) -> None:
    """What is wanted lies before or behind it, or in another file."""
    ahead = ReadAhead()
    waits = _waiting(ahead)
    ahead.guess(Stretch(path, 4 * PIECE, 6 * PIECE))
    assert waits.wait(60)
    other = _file(path.parent / "other")
    _want(
        ahead,
        Stretch(path, start * PIECE, (start + 2) * PIECE),
        Stretch(other, 5 * PIECE, 6 * PIECE),
    )
    ahead.close()
    assert read == _pieces(path, 4, 6) + _pieces(path, start, start + 2) + _pieces(other, 5, 6)


def test_a_little_is_not_worth_a_thread(path: Path) -> None:
    """Its reader has it as soon."""
    ahead, before = ReadAhead(), threading.active_count()
    ahead.want([Stretch(path, 0, _read_ahead._WORTH_BYTES - 1)])
    assert threading.active_count() == before
    ahead.close()


def test_it_waits_for_its_reader(
    path: Path, read: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read far ahead would be gone from the system's memory when it is wanted."""
    monkeypatch.setattr(_read_ahead, "AHEAD_BYTES", 2 * PIECE)
    ahead = ReadAhead()
    _want(ahead, Stretch(path, 3 * PIECE, 16 * PIECE))
    assert read == _pieces(path, 3, 5)
    waits = _waiting(ahead)
    ahead.move(PIECE)
    assert waits.wait(60)
    assert read == _pieces(path, 3, 6)
    ahead.close()


def test_closing_ends_the_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it waits for a reader that has failed."""
    monkeypatch.setattr(_read_ahead, "AHEAD_BYTES", PIECE)
    before = threading.active_count()
    ahead = ReadAhead()
    ahead.want([Stretch(path, 0, 16 * PIECE)])
    ahead.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("wrong", ["no file", "shorter"])
def test_what_goes_wrong_is_the_readers(tmp_path: Path, wrong: str) -> None:
    """Who reads the file says what is wrong with it; nothing is written to stderr here."""
    file = tmp_path / "data"
    if wrong == "shorter":
        file.write_bytes(bytes(3 * PIECE))
    errors: list[object] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        ahead = ReadAhead()
        ahead.want([Stretch(file, 0, 64 * PIECE)])
        if wrong == "no file":
            assert ahead._thread is not None
            ahead._thread.join(60)
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
    ahead = ReadAhead()
    ahead.want([Stretch(path, 0, 16 * PIECE)])
    ahead.close()


@pytest.mark.parametrize("send", ["as it is", "refuses", "is not there"])
def test_system_reads_without_sending_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, send: str
) -> None:
    """As systems do that send to sockets only; less at a time then."""
    if send == "refuses":
        monkeypatch.setattr(os, "sendfile", _raises, raising=False)
    elif send == "is not there":
        monkeypatch.delattr(os, "sendfile", raising=False)
    with path.open("rb", buffering=0) as file, open(os.devnull, "wb", buffering=0) as nowhere:
        found = _read_ahead._read_at(file, PIECE, PIECE, nowhere)
        assert 0 < found <= PIECE
        assert not _read_ahead._read_at(file, 16 * PIECE, PIECE, nowhere)


def _raises(*_: object) -> int:
    raise OSError("not a socket")
