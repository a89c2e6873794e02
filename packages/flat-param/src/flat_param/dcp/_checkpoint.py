"""A checkpoint in one part per rank, whole or not at all, whatever is killed when.

Note [Layout on disk]
    checkpoint/.metadata                  names every file below; the checkpoint is what it names
    checkpoint/<attempt>-rank-0-of-2/     one rank's slices; a checkpoint of its own
    checkpoint/<attempt>-rank-1-of-2/
Every save is an attempt of its own: a random word, in the name and in the metadata of every part.
A part is under its final name from the start, and nothing refers to it. When all ranks have said
that theirs are on the disk, one of them looks at every part, writes the metadata beside the old
one and renames it: that is the commit. What no metadata names is left over from an attempt that
was replaced or never finished. It is removed after a commit, and before the next save writes
anything; so there is room for a save wherever there was for the one that failed.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._errors import CheckpointError
from ._dcp_metadata import (
    METADATA,
    PART_PATTERN,
    attempt_of,
    digest_of,
    encode_metadata,
    parse_metadata,
    read_bytes,
)
from ._dcp_write import DATA, sync_folder, write_file, write_folder
from ._read_ahead import ReadAhead, Stretch
from ._removal import remove_folders, wait_for_room
from ._stored import Origin, Stored, merge
from ._tensor_slice import TensorSlice

_GUESS_BYTES = 8 << 20  # as many may be read in vain
_APPEARS_WITHIN_S = 5.0  # file systems over a network show a new folder late
_FULL = {errno.ENOSPC: "is full", errno.EDQUOT: "has a quota, which is used up"}


def part_name(origin: Origin) -> str:
    """The name of one rank's folder; see Note [Layout on disk]."""
    return f"{origin.attempt}-rank-{origin.rank}-of-{origin.world_size}"


def guess_ahead(ahead: ReadAhead, path: Path, part: int, parts: int) -> None:
    """Have the disk begin while metadata are read: with the part that a rank most likely wants.

    That is the one in its place, where no more ranks load than have saved. Nothing is read where
    more than one could be meant, such as that of a save that was cut short.

    Args:
        path: of the checkpoint.
        part: which of `parts` is loaded.
        parts: into which the module is cut.
    """
    found = [match for name in _names(path) if (match := PART_PATTERN.fullmatch(name))]
    likely = [match[0] for match in found if int(match[2]) == part * int(match[3]) // parts]
    if len(likely) != 1 or len(found) < parts:
        return
    file = path / likely[0] / DATA
    with suppress(OSError):  # who needs it says what is wrong with it
        if file.is_file():  # a pipe would be waited for
            ahead.guess(Stretch(file, 0, min(os.path.getsize(file), _GUESS_BYTES)))


def write_part(
    path: Path, tensor_slices: Sequence[TensorSlice], values: Mapping[str, Any], origin: Origin
) -> str:
    """Write one rank's part, or nothing. Not a collective.

    Returns:
        The digest of its metadata, by which `commit` knows the part again.

    Raises:
        CheckpointError: it cannot be written; names the disk, what is needed and what is free.
    """
    folder = path / part_name(origin)
    try:
        write_folder(folder, tensor_slices, values, origin)
        return digest_of(read_bytes(folder))
    except Exception as error:
        need = sum(tensor_slice.elements.nbytes for tensor_slice in tensor_slices)
        raised = _cannot_write(path, need, error)
        shutil.rmtree(folder, ignore_errors=True)
        raise raised from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _cannot_write(path: Path, need: int, error: Exception) -> CheckpointError:
    """What is wrong with the disk; asked before the unfinished part is removed."""
    cause = _system_error(error)
    reason = str(error).splitlines()[0] if cause is None else (cause.strerror or str(cause))
    home = next((p for p in (path, *path.parents) if p.exists()), path)
    try:
        free = shutil.disk_usage(home).free
    except OSError:
        return CheckpointError(
            f"flat_param.save_sharded: '{path}' cannot be written ({reason}), but a part of {need} "
            "bytes must be. Save to another path."
        )
    number = None if cause is None else cause.errno
    full = _FULL.get(number or 0) or ("is full" if cause is None and free < need else "")
    state = f"the disk of '{path}' {full}" if full else f"'{path}' cannot be written"
    return CheckpointError(
        f"flat_param.save_sharded: {state} ({reason}; {free} bytes are free), but this part needs "
        f"{need} bytes. Make room or save to another path; what was written of this save is "
        "removed, and an earlier checkpoint there is intact."
    )


def _system_error(error: BaseException | None) -> OSError | None:
    """The system's own error behind one of torch's; torch chains them."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, OSError):
            return error
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None


def commit(path: Path, whole: Origin, digests: Sequence[str]) -> None:
    """Make an attempt the checkpoint, and remove all others. Not a collective.

    Args:
        path: of the checkpoint.
        whole: the attempt.
        digests: what `write_part` returned on each rank.

    Raises:
        CheckpointError: a part is missing, of another attempt, or they do not fit together.
    """
    parts = []
    for rank, digest in enumerate(digests):
        origin = replace(whole, rank=rank)
        parts.append((part_name(origin), _read_part(path, origin, digest)))
    merged = merge(parts, whole)
    draft = path / f"{METADATA}-{whole.attempt}"
    try:
        write_file(draft, encode_metadata(merged))
        os.replace(draft, path / METADATA)
        sync_folder(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise _cannot_write(path, 0, error) from error
    remove_leftovers(path)
    if attempt_of(read_bytes(path)) != whole.attempt:
        raise CheckpointError(
            f"flat_param.save_sharded: another save to '{path}' replaced this one, but only one "
            "job at a time can save there. Give each job its own path."
        )


def _read_part(path: Path, origin: Origin, digest: str) -> Stored:
    folder = path / part_name(origin)
    deadline = time.monotonic() + _APPEARS_WITHIN_S
    while not (folder / METADATA).is_file():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"flat_param.save_sharded: the part of rank {origin.rank} is not in '{path}' here, "
                "but all ranks must save to one folder. Name a folder on a shared file system."
            )
        os.listdir(path)  # makes such a file system look again
        time.sleep(0.05)
    data = read_bytes(folder)
    part = parse_metadata(folder, data)
    found = part.origin and replace(part.origin, segments=origin.segments)
    if digest_of(data) != digest or found != origin:
        raise CheckpointError(
            f"flat_param.save_sharded: '{folder}' is not what rank {origin.rank} has written in "
            "this save, but a checkpoint has the parts of one save. Let one job at a time save "
            "there."
        )
    return part


def remove_leftovers(path: Path) -> None:
    """Delete the parts and drafts that the metadata does not name; see Note [Layout on disk].

    Nothing, if there is metadata that cannot be read. Only one process may be saving.
    """
    wait_for_room()
    names = _names(path)
    if not names:
        return
    kept = ""
    if METADATA in names:
        try:
            kept = attempt_of(read_bytes(path))
        except CheckpointError:
            return
    parts = [(name, PART_PATTERN.fullmatch(name)) for name in names]
    remove_folders([path / name for name, part in parts if part and part[1] != kept])
    for name in names:
        if name.startswith(METADATA + "-"):
            (path / name).unlink(missing_ok=True)


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def remove_part(path: Path, origin: Origin) -> None:
    """Delete one rank's part of an attempt that failed."""
    shutil.rmtree(path / part_name(origin), ignore_errors=True)
