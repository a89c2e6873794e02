"""An attempt of a save is there as a whole, or leaves nothing; in one process."""

from __future__ import annotations

import errno
import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flat_param
from flat_param import CheckpointError
from flat_param.checkpoint import _sharded_load
from flat_param.dcp import _checkpoint
from flat_param.dcp._checkpoint import (
    METADATA,
    attempt_of,
    commit,
    guess_ahead,
    part_name,
    remove_leftovers,
    remove_part,
    write_part,
)
from flat_param.dcp._dcp_metadata import read_bytes
from flat_param.dcp._dcp_write import DATA
from flat_param.dcp._read_ahead import ReadAhead, Stretch
from flat_param.dcp._stored import Origin
from flat_param.dcp._tensor_slice import whole

SLICES = [whole("model.a", torch.arange(9.0))]


def _origin(world_size: int = 1, rank: int | None = None) -> Origin:
    return Origin(uuid.uuid4().hex[:12], world_size, rank, ())


def _of_rank(origin: Origin, rank: int) -> Origin:
    return Origin(origin.attempt, origin.world_size, rank, ())


def _saved(path: Path) -> Origin:
    origin = _origin()
    commit(path, origin, [write_part(path, SLICES, {}, _of_rank(origin, 0))])
    return origin


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException, int], None]:
    """Let a part fail half-way, on a disk with this many bytes free."""

    def fail(error: BaseException, free: int) -> None:
        def write_folder(folder: Path, *_: Any) -> None:
            folder.mkdir(parents=True)
            (folder / "half").write_text("half")
            raise error

        monkeypatch.setattr(_checkpoint, "write_folder", write_folder)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    return fail


def _chained(error: BaseException) -> RuntimeError:
    outer = RuntimeError("torch's own words\nand more of them")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "free", "words"),
    [
        (OSError(errno.ENOSPC, "No space left"), 7, "is full (No space left; 7 bytes are free)"),
        (_chained(OSError(errno.ENOSPC, "No space left")), 7, "is full (No space left; 7 bytes"),
        (OSError(errno.EDQUOT, "Quota"), 99, "has a quota, which is used up (Quota; 99 bytes"),
        (OSError(errno.EACCES, "Permission denied"), 7, "cannot be written (Permission denied; 7"),
        (OSError("no number"), 7, "cannot be written (no number; 7 bytes"),
        (_chained(ValueError("odd")), 35, "is full (torch's own words; 35 bytes"),
        (_chained(ValueError("odd")), 36, "cannot be written (torch's own words; 36 bytes"),
    ],
)
def test_part_that_cannot_be_written_says_why_and_leaves_nothing(
    tmp_path: Path,
    failing: Callable[[BaseException, int], None],
    error: Exception,
    free: int,
    words: str,
) -> None:
    """The system's reason, or that 36 bytes need more than is free."""
    failing(error, free)
    with pytest.raises(CheckpointError) as caught:
        write_part(tmp_path, SLICES, {}, _of_rank(_origin(), 0))
    assert words in str(caught.value)
    assert "but this part needs 36 bytes" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_while_a_part_is_written_leaves_nothing(
    tmp_path: Path, failing: Callable[[BaseException, int], None]
) -> None:
    """Ctrl-C comes out as it is."""
    failing(KeyboardInterrupt(), 0)
    with pytest.raises(KeyboardInterrupt):
        write_part(tmp_path, SLICES, {}, _of_rank(_origin(), 0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no number")])
def test_error_before_anything_is_written_comes_out_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """There is nothing to remove then."""

    def write_folder(*_: Any) -> None:
        raise error

    monkeypatch.setattr(_checkpoint, "write_folder", write_folder)
    with pytest.raises((KeyboardInterrupt, CheckpointError)) as caught:
        write_part(tmp_path, SLICES, {}, _of_rank(_origin(), 0))
    assert error in (caught.value, caught.value.__cause__)


def test_draft_that_another_process_removes_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look into the folder and the removal."""
    monkeypatch.setattr(_checkpoint, "_names", lambda _: [f"{METADATA}-gone", "0" * 12])
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_commit_removes_what_other_attempts_have_left(tmp_path: Path) -> None:
    """Parts and drafts of others go, files of other names and the checkpoint's own part stay."""
    _saved(tmp_path)
    abandoned = _origin(2)
    write_part(tmp_path, SLICES, {}, _of_rank(abandoned, 1))
    (tmp_path / f"{METADATA}-{abandoned.attempt}").write_text("draft")
    (tmp_path / "notes.txt").write_text("mine")
    last = _saved(tmp_path)
    assert attempt_of(read_bytes(tmp_path)) == last.attempt
    expected = [METADATA, "notes.txt", part_name(_of_rank(last, 0))]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(expected)


def test_parts_stay_beside_metadata_whose_checksum_differs(tmp_path: Path) -> None:
    """Whose parts they are is not known then; without metadata they are nobody's."""
    origin = _saved(tmp_path)
    part = tmp_path / part_name(_of_rank(origin, 0))
    damaged = bytearray((tmp_path / METADATA).read_bytes())
    damaged[0] ^= 1
    (tmp_path / METADATA).write_bytes(damaged)
    remove_leftovers(tmp_path)
    assert part.exists()
    (tmp_path / METADATA).unlink()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []
    remove_leftovers(tmp_path / "nowhere")


def test_parts_stay_beside_metadata_whose_end_is_missing(tmp_path: Path) -> None:
    """It reads like another library's, but it names parts."""
    origin = _saved(tmp_path)
    data = (tmp_path / METADATA).read_bytes()
    for size in (len(data) - 1, data.rindex(b'{"') if b'{"' in data else len(data) // 2):
        (tmp_path / METADATA).write_bytes(data[:size])
        remove_leftovers(tmp_path)
        assert (tmp_path / part_name(_of_rank(origin, 0))).exists()


def test_parts_go_beside_metadata_of_another_library(tmp_path: Path) -> None:
    """It names none of them."""
    origin = _origin()
    write_part(tmp_path, SLICES, {}, _of_rank(origin, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    remove_leftovers(tmp_path)
    assert not (tmp_path / part_name(_of_rank(origin, 0))).exists()
    assert (tmp_path / METADATA).exists()


def test_part_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that a file system may take to show it."""
    monkeypatch.setattr(_checkpoint, "_APPEARS_WITHIN_S", 0.1)
    origin = _origin(2)
    digest = write_part(tmp_path, SLICES, {}, _of_rank(origin, 0))
    with pytest.raises(CheckpointError, match="the part of rank 1 is not in"):
        commit(tmp_path, origin, [digest, digest])
    assert not (tmp_path / METADATA).exists()


def test_part_of_another_content_is_not_taken(tmp_path: Path) -> None:
    """A part is known by its digest, and by whose it is."""
    origin = _origin()
    write_part(tmp_path, SLICES, {}, _of_rank(origin, 0))
    with pytest.raises(CheckpointError, match="is not what rank 0 has written in this save"):
        commit(tmp_path, origin, ["0" * 64])
    assert not (tmp_path / METADATA).exists()


def test_removing_a_part_leaves_the_others(tmp_path: Path) -> None:
    """One rank's part of one attempt; a second time nothing is there to remove."""
    origin = _origin(2)
    for rank in range(2):
        write_part(tmp_path, SLICES, {}, _of_rank(origin, rank))
    for _ in range(2):
        remove_part(tmp_path, _of_rank(origin, 1))
        assert [each.name for each in tmp_path.iterdir()] == [part_name(_of_rank(origin, 0))]


class Guesses(ReadAhead):
    """Notes what is guessed, and reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Stretch] = []

    def guess(self, stretch: Stretch) -> None:
        """Note it."""
        self.found.append(stretch)


def _parts(path: Path, count: int, size: int = 10) -> list[Path]:
    origin = _origin(count)
    files = [path / part_name(_of_rank(origin, rank)) / DATA for rank in range(count)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(size))
    return files


@pytest.mark.parametrize(
    ("saved", "part", "parts", "expected"),
    [(1, 0, 1, 0), (3, 2, 3, 2), (4, 0, 1, 0), (4, 1, 2, 2), (3, 1, 2, 1), (8, 3, 4, 6)],
)
def test_the_part_that_a_rank_begins_with_is_guessed(
    tmp_path: Path, saved: int, part: int, parts: int, expected: int
) -> None:
    """One of as many ranks, or of fewer than have saved."""
    ahead, files = Guesses(), _parts(tmp_path, saved)
    guess_ahead(ahead, tmp_path, part, parts)
    assert ahead.found == [Stretch(files[expected], 0, 10)]


def test_no_more_is_guessed_than_may_be_read_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the part is."""
    monkeypatch.setattr(_checkpoint, "_GUESS_BYTES", 7)
    ahead, (file,) = Guesses(), _parts(tmp_path, 1)
    guess_ahead(ahead, tmp_path, 0, 1)
    assert ahead.found == [Stretch(file, 0, 7)]


@pytest.mark.parametrize("what", ["no folder", "no part", "more ranks", "two attempts", "a folder"])
def test_nothing_is_guessed_where_nobody_can_know(tmp_path: Path, what: str) -> None:
    """And only files are opened."""
    files = _parts(tmp_path, {"no folder": 0, "no part": 0, "two attempts": 1}.get(what, 2))
    if what == "two attempts":
        _parts(tmp_path, 1)
    if what == "a folder":
        files[0].unlink()
        files[0].mkdir()
    ahead, parts = Guesses(), {"more ranks": 3, "a folder": 2}.get(what, 1)
    guess_ahead(ahead, tmp_path / what if what == "no folder" else tmp_path, 0, parts)
    assert not ahead.found


def test_load_has_the_disk_begin_before_it_knows_what_is_there(
    group_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is planned costs no time of the disk's then."""
    order: list[str] = []
    module = flat_param.fully_shard(torch.nn.Linear(4, 4))
    flat_param.save_sharded(module, tmp_path / "saved")
    for name in ("guess", "want"):
        real = getattr(ReadAhead, name)
        note = lambda *args, name=name, real=real: (order.append(name), real(*args))[1]  # noqa: E731
        monkeypatch.setattr(ReadAhead, name, note)
    parse = _sharded_load.parse_metadata
    monkeypatch.setattr(
        _sharded_load, "parse_metadata", lambda *args: (order.append("metadata"), parse(*args))[1]
    )
    flat_param.load_sharded(module, tmp_path / "saved")
    assert order == ["guess", "metadata", "want"]
