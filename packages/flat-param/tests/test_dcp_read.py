"""Damaged, foreign and hostile checkpoints: one error type, and nothing changed."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flat_param import CheckpointError
from flat_param.dcp import _entries
from flat_param.dcp._checkpoint import commit, write_part
from flat_param.dcp._dcp_metadata import parse_metadata, read_bytes
from flat_param.dcp._dcp_read import read_folder
from flat_param.dcp._stored import Origin
from flat_param.dcp._tensor_slice import whole

CLAIMS = (
    "claimed_sizes_are_checked_first",
    "data_of_another_checkpoint_is_refused",
    "every_flipped_bit_is_refused",
    "many_rectangles_take_linear_time",
    "mutated_metadata_is_refused_cleanly",
    "pickles_cannot_change_classes",
    "plain_files_are_all_or_nothing",
    "rectangles_that_overlap_are_refused",
    "resharding_writes_checksums",
    "wrong_types_are_refused_cleanly",
)


@pytest.fixture(scope="module")
def results(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """All checks of workers/damage.py, run once on one rank."""
    (found,) = ranks(1, "damage", str(tmp_path_factory.mktemp("damage")), timeout_s=400)
    return found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds(results: dict[str, str], claim: str) -> None:
    """Each `check_<claim>` of workers/damage.py passes."""
    assert not results[claim], results[claim]


@pytest.mark.dist
@pytest.mark.slow
def test_every_check_is_listed(results: dict[str, str]) -> None:
    """No check of the worker is forgotten here."""
    assert sorted(results) == sorted(CLAIMS)


def _checkpoint(path: Path) -> None:
    origin = Origin(uuid.uuid4().hex[:12], 1, None, ())
    part = Origin(origin.attempt, 1, 0, ())
    tensors, values = [whole("model.a", torch.arange(9.0))], {"model.b": {"c": torch.arange(9.0)}}
    commit(path, origin, [write_part(path, tensors, values, part)])


def _read(path: Path) -> torch.Tensor:
    """A value, which torch reads."""
    found = read_folder(path, parse_metadata(path, read_bytes(path)), [], keys=["model.b"])
    return found["model.b"]["c"]


@pytest.fixture
def _ctrl_c_raises() -> Iterator[None]:
    """Also where the shell started this process in the background, and so deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_raises")
def test_ctrl_c_while_torch_reads_comes_out_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any of torch's calls of the file: no checkpoint seems damaged, and no thread stays."""
    _checkpoint(tmp_path)
    left = [0]  # calls until the interrupt

    def interrupting(name: str) -> Callable[..., Any]:
        real = getattr(_entries._Part, name)

        def call(self: Any, *args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGINT)
            return real(self, *args)

        return call

    for name in ("readinto", "seek", "tell"):
        monkeypatch.setattr(_entries._Part, name, interrupting(name))
    threads = threading.active_count()
    for calls in range(1, 1000):
        left[0] = calls
        try:
            found = _read(tmp_path)
        except KeyboardInterrupt:
            continue
        break
    assert torch.equal(found, torch.arange(9.0))
    assert calls > 10
    deadline = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # one that Ctrl-C came to as it began ends by itself
    assert threading.active_count() == threads


def test_a_thread_that_ctrl_c_comes_to_as_it_starts_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, and the file is closed by then."""
    _checkpoint(tmp_path)
    _read(tmp_path)  # imports what it needs
    before, loaded, start = set(threading.enumerate()), list[Any](), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        patched.setattr(_entries, "_load", loaded.append)
        with pytest.raises(KeyboardInterrupt):
            _read(tmp_path)
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
    assert not loaded


@pytest.mark.parametrize("good", [0, 3, 5])
def test_an_error_of_the_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """The system's words, where torch goes on after it and raises what comes of that."""
    _checkpoint(tmp_path)
    left = [good]

    class Failing:
        def __init__(self, file: Any) -> None:
            self.readinto, self._file = file.readinto, file

        def seek(self, offset: int) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EIO, "Input/output error")
            return self._file.seek(offset)

    real = _entries._Part.__init__
    monkeypatch.setattr(
        _entries._Part, "__init__", lambda self, file, *rest: real(self, Failing(file), *rest)
    )
    with pytest.raises(CheckpointError, match=r"cannot be read \(\[Errno 5\] Input/output error\)"):
        _read(tmp_path)
