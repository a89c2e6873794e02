"""torch.distributed.checkpoint's files, with checksums, written beside the last checkpoint.

Note [Layout on disk]
    checkpoint/.metadata                         names every file below; replaced by a rename
    checkpoint/save-<word>/__0_0.distcp          one rank's tensors, as torch writes them
Each save has a separate folder, so the last checkpoint is intact until `.metadata` is replaced.
Then the files that the replaced `.metadata` names are deleted, and no others: a folder with a
similar name may be another checkpoint. So the folder of a save that was killed stays.

Any torch reads the result: a checksum is an attribute of the entry in `.metadata`, and the checksum
of `.metadata` follows its pickle, where torch does not read.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._errors import CheckpointError
from .._torch_compat import checkpoint_metadata_classes

METADATA = ".metadata"
_SAVE_PREFIX = "save-"
_SAVED_FILE = re.compile(r"save-[0-9a-f]{12}/[^/]+")
_TRAILER = b"flat-param checksum "
_BLOCK_BYTES = 1 << 20
_COLUMNS = 2053


class _Entry(io.BytesIO):
    """An entry of a checkpoint's file, read at once.

    torch reads it in C++, where an interrupt in a method of Python becomes another error. So it has
    the methods of `BytesIO`.
    """

    def checksum(self) -> int:
        """A checksum that detects damage but not forgery.

        In each block, columns of 2053 64-bit words are added up modulo 2**64, and the CRC goes over
        the sums and the remaining bytes: several times faster than the CRC alone. A change of one
        word changes its column. 2053 is prime, so swapped pages change columns.
        """
        sums = bytearray(8 * _COLUMNS)
        out = torch.frombuffer(sums, dtype=torch.int64)
        found, data = 0, self.getbuffer()
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            rows = len(block) // len(sums)
            if rows:
                words = torch.frombuffer(block, dtype=torch.int64, count=rows * _COLUMNS)
                torch.sum(words.view(rows, _COLUMNS), dim=0, out=out)
                found = zlib.crc32(sums, found)
            found = zlib.crc32(block[rows * len(sums) :], found)
        return found


def _entry_at(file: BinaryIO, place: Any, large: _Entry) -> _Entry:
    """Read an entry of a file, a large one into the memory of the previous large one.

    Args:
        file: where it is.
        place: its first byte and its length.
        large: is returned if the entry is large, and otherwise stays as it is.
    """
    if file.seek(0, os.SEEK_END) < place.offset + place.length:
        raise EOFError(f"the file ends before {place.length} bytes at {place.offset}")
    entry = large if place.length >= _BLOCK_BYTES else _Entry()
    if len(entry.getbuffer()) < place.length:
        entry.seek(place.length - 1)
        entry.write(b"\0")
    entry.truncate(place.length)
    entry.seek(0)
    file.seek(place.offset)
    file.readinto(entry.getbuffer())  # type: ignore[attr-defined]  # binary files do
    return entry


class CheckedWriter(FileSystemWriter):
    """Writes a checkpoint next to the previous one, see Note [Layout on disk].

    Args:
        path: of the checkpoint.
        word: the name of this save, the same on all ranks.
    """

    def __init__(self, path: Path, word: str) -> None:
        super().__init__(path / (_SAVE_PREFIX + word))
        self._folder = path / (_SAVE_PREFIX + word)
        self._replaced: set[Path] = set()

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's tensors and note their checksums."""
        written = super().write_data(plan, planner)
        large = _Entry()
        for entry in (result.storage_data for result in written.wait()):
            with (self._folder / entry.relative_path).open("rb") as file:
                entry.checksum = _entry_at(file, entry, large).checksum()
            entry.relative_path = f"{self._folder.name}/{entry.relative_path}"
        _sync_folder(self._folder)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Replace the metadata; called on one rank when all have written."""
        metadata.storage_data = {each.index: each.storage_data for own in results for each in own}
        metadata.storage_meta = self.storage_meta()
        data = pickle.dumps(metadata)
        draft = self._folder / METADATA
        with draft.open("wb") as file:
            file.write(data + _TRAILER + f"{zlib.crc32(data):08x}".encode())
            file.flush()
            os.fsync(file.fileno())
        self._replaced = _saved_files(self._folder.parent)
        draft.replace(self._folder.parent / METADATA)
        _sync_folder(self._folder.parent)

    def remove_replaced(self) -> None:
        """Delete the files of the checkpoint that this one has replaced, and their folder."""
        with suppress(OSError):
            for file in self._replaced:
                file.unlink(missing_ok=True)
            for folder in {file.parent for file in self._replaced}:
                folder.rmdir()

    def remove(self) -> None:
        """Delete the folder of this save."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _saved_files(path: Path) -> set[Path]:
    """The files of the checkpoint in a folder, if `CheckedWriter` has written it."""
    try:
        metadata = CheckedReader(path).read_metadata()
    except CheckpointError:
        return set()
    names = {entry.relative_path for entry in (metadata.storage_data or {}).values()}
    return {path / name for name in names if _SAVED_FILE.fullmatch(name)}


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class CheckedReader(FileSystemReader):
    """Reads files of `CheckedWriter` or torch; compares checksums and never runs code from them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self._checked: set[tuple[str, int]] = set()
        self._large = _Entry()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, unpickled with classes of torch's metadata only."""
        path = self._path
        try:
            data = (path / METADATA).read_bytes()
        except OSError as error:
            why = f"has no {METADATA} ({error.strerror}), but each complete checkpoint has one"
            raise CheckpointError(
                f"flat_param.load_sharded: '{path}' {why if path.exists() else 'does not exist'}. "
                "Pass the folder that save_sharded was given; or its save was cut short."
            ) from error
        body, found, given = data.rpartition(_TRAILER)
        if found and f"{zlib.crc32(body):08x}".encode() != given:
            raise CheckpointError(
                f"flat_param.load_sharded: the metadata of '{path}' are damaged: their checksum "
                "differs. Load another checkpoint."
            )
        metadata = _metadata_in(body if found else data, path)
        for entry in (metadata.storage_data or {}).values():
            name = entry.relative_path
            if os.path.isabs(name) or ".." in Path(name).parts:
                raise CheckpointError(
                    f"flat_param.load_sharded: '{path}' names the file '{name}', which is not "
                    "inside. Do not trust this checkpoint."
                )
        return metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read as torch does; every entry comes from `_slice_file`."""
        done = super().read_data(plan, planner)
        if plan.items and not self._checked:
            raise CheckpointError(
                f"flat_param.load_sharded: torch {torch.__version__} reads checkpoints in "
                "another way, so checksums were not compared. Use torch 2.9 to 2.15."
            )
        return done

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """The bytes of an entry, after its checksum was compared."""
        place = sinfo.relative_path, sinfo.offset
        entry = _entry_at(file, sinfo, self._large)
        if place not in self._checked:
            expected = getattr(sinfo, "checksum", None)  # torch's own writer adds none
            if expected is not None and entry.checksum() != expected:
                raise CheckpointError(
                    f"flat_param.load_sharded: '{file.name}' is damaged: {sinfo.length} bytes at "
                    f"{sinfo.offset} have another checksum than when they were saved. Load another "
                    "checkpoint."
                )
            self._checked.add(place)
        return entry


class _SafeLoadPlanner(DefaultLoadPlanner):
    """Loads plain values without running code of the checkpoint."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that consists of numbers, texts, tensors and containers."""
        key = read_item.dest_index.fqn
        try:
            found = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"flat_param.load_sharded: '{key}' needs code to be loaded "
                f"({_first_line(error)}), but only plain values and tensors are. Do not trust this "
                "checkpoint, or load it with torch.distributed.checkpoint.load."
            ) from error
        self.state_dict[key] = found


def read_into(reader: CheckedReader, metadata: Metadata, target: dict[str, Any]) -> None:
    """Fill the tensors of `target` by key, and replace its other values. Not a collective."""
    planner = _SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(target, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_global_plan([planner.create_local_plan()])[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _metadata_in(data: bytes, path: Path) -> Metadata:
    file = io.BytesIO(data)
    try:
        found = _MetadataUnpickler(file).load()
        if file.tell() != len(data):  # a damaged checksum
            raise ValueError("they end before the file does")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"flat_param.load_sharded: the metadata of '{path}' cannot be read "
            f"({_first_line(error)}). They are damaged: load another checkpoint."
        ) from error
    if not isinstance(found, Metadata):
        raise CheckpointError(
            f"flat_param.load_sharded: the metadata of '{path}' are a {type(found).__name__}, "
            "but torch.distributed.checkpoint's Metadata are expected. Load another folder."
        )
    return found


def _substitute(make: Callable[..., Any]) -> type:
    """A class whose calls return the result of `make`, so a pickle cannot change torch's class."""
    return type("Substitute", (), {"__new__": lambda cls, *args: make(*args)})


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles classes of torch's checkpoint metadata only.

    torch's weights-only unpickler does not read the protocol in which torch writes metadata.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        file_entry, memory_format = checkpoint_metadata_classes()
        self._makers: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": dict,
            "torch.Size": torch.Size,
            "torch.device": torch.device,
            "torch.serialization._get_layout": {"torch.strided": torch.strided}.__getitem__,
            f"{memory_format.__module__}.{memory_format.__name__}": memory_format,
            # Python 3.11.0 to 3.11.3 pickle members of that enumeration by name.
            "builtins.getattr": lambda _, name: memory_format[name],
        }
        for kind in (
            *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
            *(TensorProperties, TensorStorageMetadata, file_entry),
        ):
            self._makers[f"{kind.__module__}.{kind.__name__}"] = partial(object.__new__, kind)

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if module in ("pathlib", "pathlib._local"):
            return _substitute(lambda *parts: "/".join(map(str, parts)))
        make = self._makers.get(f"{module}.{name}")
        if make is None:
            raise CheckpointError(
                f"flat_param.load_sharded: the metadata name '{module[:80]}.{name[:80]}', but only "
                "the classes of torch.distributed.checkpoint may appear there. Do not trust this "
                "file."
            )
        return _substitute(make)
