"""torch.distributed.checkpoint's files, with checksums, written beside the last checkpoint.

Note [Layout on disk]
    checkpoint/.metadata             names every file below; replaced by a rename
    checkpoint/save-<word>/__0_0.distcp   one rank's tensors, as torch writes them
Each save has a separate folder, so the last checkpoint is intact until `.metadata` is replaced. Any
torch reads the result: a checksum is an attribute of the entry in `.metadata`, and the checksum of
`.metadata` follows its pickle, where torch does not read.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._errors import CheckpointError

METADATA = ".metadata"
SAVE_PREFIX = "save-"
_TRAILER = b"flat-param checksum "
_OLD_PART = re.compile(r"[0-9a-f]+-rank-\d+-of-\d+/")
_BLOCK_BYTES = 1 << 24
_COLUMNS = 2053


def checksum(data: memoryview, before: int = 0) -> int:
    """A checksum that detects damage but not forgery, several times faster than CRC-32 alone.

    Columns of 2053 64-bit words are added up modulo 2**64, and the CRC goes over the sums and the
    remaining bytes: a change of one word changes its column. 2053 is prime, so swapped pages change
    columns.
    """
    rows = len(data) // (8 * _COLUMNS)
    if rows:
        words = torch.frombuffer(data, dtype=torch.int64, count=rows * _COLUMNS)
        sums = bytearray(8 * _COLUMNS)
        out = torch.frombuffer(sums, dtype=torch.int64)
        torch.sum(words.view(rows, _COLUMNS), dim=0, out=out)
        before = zlib.crc32(sums, before)
    return zlib.crc32(data[rows * 8 * _COLUMNS :], before)


def _checksum_of(blocks: Iterable[memoryview]) -> int:
    """The checksum of an entry, whose blocks have `_BLOCK_BYTES` each."""
    found = 0
    for block in blocks:
        found = checksum(block, found)
    return found


def _blocks_in(file: BinaryIO, entry: Any) -> Iterator[memoryview]:
    """The blocks of a file's entry; each has the memory of the block before it."""
    file.seek(entry.offset)
    memory = memoryview(bytearray(min(entry.length, _BLOCK_BYTES)))
    for start in range(0, entry.length, _BLOCK_BYTES):
        block = memory[: entry.length - start]
        _fill(file, block)
        yield block


def _entry_in(file: BinaryIO, entry: Any) -> io.BytesIO:
    """An entry of a file, read at once."""
    file.seek(entry.offset)
    data = io.BytesIO(file.read(entry.length))
    if data.getbuffer().nbytes != entry.length:
        raise EOFError(f"the file ends before {entry.length} bytes at {entry.offset}")
    return data


def _fill(file: BinaryIO, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        read: int = file.readinto(memory[at:])  # type: ignore[attr-defined]  # binary files do
        if not read:
            raise EOFError(f"the file ends {len(memory) - at} bytes early")
        at += read


class CheckedWriter(FileSystemWriter):
    """Writes a checkpoint next to the previous one, see Note [Layout on disk].

    Args:
        path: of the checkpoint.
        word: the name of this save, the same on all ranks.
    """

    def __init__(self, path: Path, word: str) -> None:
        super().__init__(path)
        self._folder = path / (SAVE_PREFIX + word)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder of this save."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files, in the folder of this save."""
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            plan.storage_data.prefix = f"{self._folder.name}/{plan.storage_data.prefix}"
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's tensors and note their checksums."""
        written = super().write_data(plan, planner)
        files: dict[str, list[Any]] = {}
        for result in written.wait():
            files.setdefault(result.storage_data.relative_path, []).append(result.storage_data)
        for name, entries in files.items():
            with (Path(self.path) / name).open("rb") as file:
                for entry in entries:
                    entry.checksum = _checksum_of(_blocks_in(file, entry))
        if files:
            _sync_folder(self._folder)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Replace the metadata; called on one rank when all have written."""
        metadata.storage_data = {each.index: each.storage_data for own in results for each in own}
        metadata.storage_meta = self.storage_meta()
        data = pickle.dumps(metadata)
        folder = Path(self.path)
        draft = folder / f"{METADATA}-{self._folder.name}"
        with draft.open("wb") as file:
            file.write(data + _TRAILER + f"{checksum(memoryview(bytearray(data))):08x}".encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / METADATA)
        _sync_folder(folder)

    def remove_others(self) -> None:
        """Delete folders and drafts of other saves after this one has become the checkpoint."""
        path, own = Path(self.path), self._folder.name
        for each in path.iterdir():
            if each.name.startswith(SAVE_PREFIX) and each.name != own:
                shutil.rmtree(each, ignore_errors=True)
            elif each.name.startswith(f"{METADATA}-") and each.name != f"{METADATA}-{own}":
                each.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the folder of this save."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            (Path(self.path) / f"{METADATA}-{self._folder.name}").unlink(missing_ok=True)


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
        self._checked: set[tuple[str, int]] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, unpickled with classes of torch's metadata only."""
        path = Path(self.path)
        try:
            data = (path / METADATA).read_bytes()
        except OSError as error:
            why = f"has no {METADATA} ({error.strerror}), but each complete checkpoint has one"
            raise CheckpointError(
                f"flat_param.load_sharded: '{path}' {why if path.exists() else 'does not exist'}. "
                "Pass the folder that save_sharded was given; or its save was cut short."
            ) from error
        body, found, given = data.rpartition(_TRAILER)
        if found and f"{checksum(memoryview(bytearray(body))):08x}".encode() != given:
            raise CheckpointError(
                f"flat_param.load_sharded: the metadata of '{path}' are damaged: their checksum "
                "differs. Load another checkpoint."
            )
        metadata = _metadata_in(body if found else data, path)
        entries = metadata.storage_data or {}
        for entry in entries.values():
            name = entry.relative_path
            if os.path.isabs(name) or ".." in Path(name).parts:
                raise CheckpointError(
                    f"flat_param.load_sharded: '{path}' names the file '{name}', which is not "
                    "inside. Do not trust this checkpoint."
                )
            if _OLD_PART.match(name):
                raise CheckpointError(
                    f"flat_param.load_sharded: '{path}' was saved by flat_param 0.1, whose format "
                    "is not read any more. Load it with that version and save it with "
                    "torch.distributed.checkpoint."
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
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
        data = _entry_in(file, sinfo)
        place = sinfo.relative_path, sinfo.offset
        if place not in self._checked:
            expected = getattr(sinfo, "checksum", None)  # torch's own writer adds none
            memory = data.getbuffer()
            blocks = (memory[at : at + _BLOCK_BYTES] for at in range(0, len(memory), _BLOCK_BYTES))
            if expected is not None and _checksum_of(blocks) != expected:
                raise CheckpointError(
                    f"flat_param.load_sharded: '{file.name}' is damaged: {sinfo.length} bytes at "
                    f"{sinfo.offset} have another checksum than when they were saved. Load another "
                    "checkpoint."
                )
            self._checked.add(place)
        return data


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads plain values without running code of the checkpoint.

    Attributes:
        values: loaded values by key.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that consists of numbers, texts, tensors and containers."""
        key = read_item.dest_index.fqn
        try:
            self.values[key] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"flat_param.load_sharded: '{key}' needs code to be loaded "
                f"({_first_line(error)}), but only plain values and tensors are. Do not trust this "
                "checkpoint, or load it with torch.distributed.checkpoint.load."
            ) from error


def read_into(reader: CheckedReader, metadata: Metadata, target: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of `target` by key; return other values. Not a collective."""
    planner = SafeLoadPlanner()
    planner.set_up_planner(target, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return planner.values


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _metadata_in(data: bytes, path: Path) -> Metadata:
    file = io.BytesIO(data)
    try:
        metadata = _MetadataUnpickler(file).load()
        if file.tell() != len(data):  # a damaged checksum
            raise ValueError("they end before the file does")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"flat_param.load_sharded: the metadata of '{path}' cannot be read "
            f"({_first_line(error)}). They are damaged: load another checkpoint."
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"flat_param.load_sharded: the metadata of '{path}' are a {type(metadata).__name__}, "
            "but torch.distributed.checkpoint's Metadata are expected. Load another folder."
        )
    return metadata


_CLASSES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
}
_PATHS = frozenset({"Path", "PosixPath", "PurePosixPath", "WindowsPath"})
_LAYOUTS: Mapping[str, torch.layout] = {
    "torch.strided": torch.strided,
    "torch.sparse_coo": torch.sparse_coo,
}
_VALUES: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): lambda name: _LAYOUTS[name],
    ("collections", "OrderedDict"): dict,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles classes of torch's checkpoint metadata only.

    Each class is replaced by a substitute for this file, so the pickle cannot change torch's
    classes.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = self._made.get((module, name))
        if known is None:
            known = self._made[module, name] = self._found(module, name)
        return known

    def _found(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            real = getattr(__import__(module, fromlist=[name]), name)
            if name == "_MEM_FORMAT_ENCODING":
                return _door(name, real)
            return _door(name, lambda *args: object.__new__(real))
        if (module, name) in _VALUES:
            return _door(name, _VALUES[module, name])
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _door(name, lambda *parts: os.path.join(*map(str, parts)) if parts else "")
        if (module, name) == ("builtins", "getattr"):
            return self._member
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise CheckpointError(
            f"flat_param.load_sharded: the metadata name '{module[:80]}.{name[:80]}', but only the "
            "classes of torch.distributed.checkpoint may appear there. Do not trust this file."
        )

    def _member(self, owner: Any, name: Any) -> Any:
        """Return a memory format by name, as Python 3.11 before 3.11.4 pickles it."""
        of = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
        if owner is not self._made.get(of) or type(name) is not str:
            raise CheckpointError(
                "flat_param.load_sharded: the metadata ask for an attribute of another object than "
                "a memory format. Do not trust this file."
            )
        from torch.distributed.checkpoint import metadata

        return metadata._MEM_FORMAT_ENCODING[name]


def _door(name: str, make: Callable[..., Any]) -> type:
    """A class whose calls return the result of `make`."""
    return type(name, (), {"__new__": lambda cls, *args: make(*args)})
