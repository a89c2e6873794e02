"""The file that says what a checkpoint holds: torch.distributed.checkpoint's, and more.

Note [Metadata file]
    pickle of torch's `Metadata` | JSON | 20 bytes: magic, length of the JSON, CRC-32 of the rest
torch reads the pickle and ignores what follows. The JSON has the save it comes from, how the
module was cut, and a checksum of each stored tensor and value.

Rule 1: nothing here runs code from a file. Objects are unpickled as inert ones of classes made for
        this one file, and their fields are checked before anything is made of them.
Rule 2: what a file must hold is checked against its size before anything is read or allocated.
Rule 3: whatever is wrong, the error is a CheckpointError.
Limits: 1 GiB of metadata; see also _stored.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError
from .._torch_compat import storage_info
from ._inert import fields_of, ints_of, load_inert
from ._saved_keys import nested_path
from ._saved_layout import decode, encode
from ._stored import (
    MAX_DIMS,
    MAX_SIZE,
    Origin,
    Place,
    Stored,
    StoredChunk,
    StoredTensor,
    check_places,
    check_tensor,
)

METADATA = ".metadata"
PART_PATTERN = re.compile(r"([0-9a-f]{12})-rank-([0-9]{1,9})-of-([0-9]{1,9})")

_CLASSES = "torch.distributed.checkpoint.metadata"
_MAX_BYTES = 1 << 30
_FOOTER = struct.Struct("<8sQI")
_MAGIC = b"flatparm"

Index = tuple[str, tuple[int, ...] | None]


def encode_metadata(stored: Stored) -> bytes:
    """The file's content; see Note [Metadata file]."""
    dcp = _metadata_classes()
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for key, entry in stored.entries.items():
        if isinstance(entry, Place):
            state[key] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(key)] = _info(entry)
            continue
        chunks = []
        for chunk in entry.chunks:
            offsets = torch.Size(chunk.offsets)
            chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
            storage[dcp.MetadataIndex(key, offsets)] = _info(chunk.place)
        properties = dcp.TensorProperties(dtype=entry.dtype)
        state[key] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    paths = {key: nested_path(key) for key in stored.entries}
    pickled = pickle.dumps(dcp.Metadata(state, planner_data=paths, storage_data=storage))
    text = json.dumps(_trailer(stored), separators=(",", ":")).encode()
    body = pickled + text + _FOOTER.pack(_MAGIC, len(text), 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def _metadata_classes() -> Any:
    """torch's module of them, imported at the first save, since it brings DTensor and sympy.

    In a thread of ours, where no signal's handler runs: what Ctrl-C leaves of an import that it
    stops halfway cannot be imported again, and no later save would work.
    """
    if _CLASSES in sys.modules:
        return import_module(_CLASSES)
    try:
        with ThreadPoolExecutor(1) as importer:
            return importer.submit(import_module, _CLASSES).result()
    except RuntimeError:  # a process that is ending starts no thread
        return import_module(_CLASSES)


def _info(place: Place) -> Any:
    return storage_info(place.path, place.offset, place.length)


def _trailer(stored: Stored) -> dict[str, Any]:
    assert stored.origin is not None
    origin, sums = stored.origin, dict[str, list[list[Any]]]()
    for place in stored.places():
        sums.setdefault(place.path, []).append([place.offset, place.length, place.checksum])
    return {
        "format": 1,
        "attempt": origin.attempt,
        "world_size": origin.world_size,
        "rank": origin.rank,
        "segments": encode(origin.segments),
        "checksums": sums,
    }


def read_bytes(folder: Path) -> bytes:
    """The metadata file.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        begun = folder.is_dir() and any(PART_PATTERN.fullmatch(p) for p in os.listdir(folder))
        raise CheckpointError(
            f"flat_param.load: '{folder}' has no {METADATA}, but a complete checkpoint has. "
            + (
                "A save is under way, or was cut short: load again when it is over."
                if begun
                else "A save that was cut short leaves none: load the one before."
            )
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if len(data) > _MAX_BYTES:
        raise CheckpointError(
            f"flat_param.load: '{path}' has more than {_MAX_BYTES} bytes, but that is the most a "
            "checkpoint's metadata may have. It is damaged or foreign: load another one."
        )
    return data


def digest_of(data: bytes) -> str:
    """A digest that tells one metadata file from every other.

    Not a CRC-32: data that ends in its own has the same one whatever it is.
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def attempt_of(data: bytes) -> str:
    """The save that a metadata file's content is from; empty where another library wrote it.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        trailer = _split(data)
        if trailer is None:
            _stored(load_inert(data), None)  # not ours with its end cut off
    except Exception as error:
        raise _unreadable(Path(METADATA), error) from error
    return "" if trailer is None else str(trailer.get("attempt"))


def parse_metadata(folder: Path, data: bytes) -> Stored:
    """What a checkpoint holds (Rules 1 to 3), from its metadata file's content.

    Raises:
        CheckpointError: damaged metadata, or a file that is missing or too short.
    """
    path = folder / METADATA
    try:
        trailer = _split(data)
        stored = _stored(load_inert(data), trailer)
    except CheckpointError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from error
    _check_files(folder, check_places(stored.places()))
    return stored


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    text = str(error) if isinstance(error, (OSError, _Odd)) else type(error).__name__
    return CheckpointError(
        f"flat_param.load: '{path}' cannot be read ({text}), but it describes the checkpoint. "
        "It is truncated, damaged or foreign: load another one."
    )


class _Odd(Exception):
    """Something is not as it should be; the reason is safe to show."""


def _split(data: bytes) -> dict[str, Any] | None:
    """The JSON, or None where there is none."""
    if len(data) < _FOOTER.size:
        return None
    magic, length, crc = _FOOTER.unpack(data[-_FOOTER.size :])
    if magic != _MAGIC:
        return None
    if zlib.crc32(memoryview(data)[:-4]) != crc:
        raise _Odd("its checksum differs")
    text = data[-_FOOTER.size - length : -_FOOTER.size] if length < len(data) else b""
    trailer = json.loads(text)
    if not isinstance(trailer, dict) or trailer.get("format") != 1:
        raise _Odd("it is of another format")
    return trailer


def _stored(metadata: Any, trailer: dict[str, Any] | None) -> Stored:
    fields = fields_of(metadata, "Metadata")
    places = _places(fields["storage_data"], None if trailer is None else _sums(trailer))
    entries: dict[str, StoredTensor | Place] = {}
    for key, entry in _dict(fields["state_dict_metadata"]).items():
        if type(key) is not str:
            raise _Odd("a key is no text")
        nested_path(key)
        if type(entry).__name__ == "TensorStorageMetadata":
            entries[key] = _tensor(key, fields_of(entry, "TensorStorageMetadata"), places)
        else:
            fields_of(entry, "BytesStorageMetadata")
            entries[key] = places[key, None]
    return Stored(entries, None if trailer is None else _origin(trailer))


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _Odd(f"a {type(value).__name__} is where a dictionary is expected")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_SIZE:
        raise _Odd("a size is no number, negative or too large")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(map(_size, ints_of(value)))
    if len(sizes) > MAX_DIMS:
        raise _Odd(f"a tensor has {len(sizes)} dimensions, but {MAX_DIMS} is the most")
    numel = 1
    for size in sizes:
        numel = _size(numel * size)
    return sizes


def _sums(trailer: dict[str, Any]) -> dict[tuple[str, int, int], int]:
    return {
        (path, offset, length): _size(checksum)
        for path, entries in _dict(trailer["checksums"]).items()
        for offset, length, checksum in entries
    }


def _places(value: Any, sums: dict[tuple[str, int, int], int] | None) -> dict[Index, Place]:
    places: dict[Index, Place] = {}
    for index, info in _dict(value).items():
        of, where = fields_of(index, "MetadataIndex"), fields_of(info, "_StorageInfo")
        offset = of.get("offset")
        path, start, length = where["relative_path"], where["offset"], where["length"]
        if type(path) is not str or "\0" in path or type(of["fqn"]) is not str:
            raise _Odd("a name is no text")
        if where.get("transform_descriptors"):
            raise _Odd("an entry is compressed or encrypted, which is not supported")
        if sums is None and PART_PATTERN.match(path):
            raise _Odd("its end is missing")
        checksum = None if sums is None else sums[path, _size(start), _size(length)]
        place = Place(path, _size(start), _size(length), checksum)
        known: Index = (of["fqn"], None if offset is None else _sizes(offset))
        if places.setdefault(known, place) is not place:
            raise _Odd("an entry is there twice")
    return places


def _tensor(key: str, fields: dict[str, Any], places: dict[Index, Place]) -> StoredTensor:
    dtype = fields_of(fields["properties"], "TensorProperties", kind=tuple)[0]
    if not isinstance(dtype, torch.dtype) or type(fields["chunks"]) is not list:
        raise _Odd("a tensor has no dtype, or no list of rectangles")
    chunks = []
    for entry in fields["chunks"]:
        of = fields_of(entry, "ChunkStorageMetadata")
        offsets = _sizes(of["offsets"])
        chunks.append(StoredChunk(offsets, _sizes(of["sizes"]), places[key, offsets]))
    tensor = StoredTensor(dtype, _sizes(fields["size"]), tuple(chunks))
    check_tensor(key, tensor)
    return tensor


def _origin(trailer: dict[str, Any]) -> Origin:
    attempt, rank = trailer["attempt"], trailer["rank"]
    if type(attempt) is not str:
        raise _Odd("its save has no name")
    return Origin(
        attempt,
        _size(trailer["world_size"]),
        None if rank is None else _size(rank),
        decode(trailer["segments"]),
    )


def _check_files(folder: Path, needed: dict[str, int]) -> None:
    root = folder.resolve()
    for relative, size in needed.items():
        try:
            path = (folder / relative).resolve()
            inside = path.is_relative_to(root)
            actual = os.path.getsize(path) if path.is_file() else -1
        except (OSError, RuntimeError, ValueError) as error:  # loops of links, too long names
            raise _unreadable(folder / METADATA, error) from error
        if not inside:
            raise CheckpointError(
                f"flat_param.load: the metadata points to '{relative[:200]}', but a checkpoint's "
                "files are inside its folder. Do not trust this file."
            )
        if actual < size:
            state = "is missing" if actual < 0 else f"has {actual} bytes"
            raise CheckpointError(
                f"flat_param.load: file '{path}' {state}, but {size} bytes are needed. "
                "The checkpoint is truncated: load another one."
            )
