"""What a checkpoint holds and where, as plain values that were checked once.

Limits: 64 dimensions, 2**62 elements, bytes or files' positions. All checks are linear in the
number of stored rectangles, but for one sort.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from .._errors import CheckpointError
from ._saved_layout import SavedSegment

MAX_DIMS, MAX_SIZE = 64, 1 << 62


@dataclass(frozen=True)
class Place:
    """Where the bytes of one tensor or value are.

    Args:
        path: file, relative to the checkpoint's folder.
        offset: first byte.
        length: bytes.
        checksum: of these bytes; None where the checkpoint has none.
    """

    path: str
    offset: int
    length: int
    checksum: int | None = None


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a tensor.

    Args:
        offsets: its first index along each dimension.
        sizes: its size along each dimension.
        place: where it is.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in rectangles."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def numel_stored(self) -> int:
        """Elements in all rectangles; what is allocated for a tensor is no more."""
        return sum(math.prod(chunk.sizes) for chunk in self.chunks)


@dataclass(frozen=True)
class Origin:
    """The save that a checkpoint, or one rank's part of it, comes from.

    Args:
        attempt: a random word; the same on all ranks of one save, and never again.
        world_size: number of parts.
        rank: whose part this is; None for the whole checkpoint.
        segments: how the module was cut.
    """

    attempt: str
    world_size: int
    rank: int | None
    segments: tuple[SavedSegment, ...]


@dataclass(frozen=True)
class Stored:
    """Everything in a checkpoint, by key; `origin` is None where another library wrote it."""

    entries: dict[str, StoredTensor | Place] = field(default_factory=dict)
    origin: Origin | None = None

    def tensor(self, key: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """What is stored of one tensor.

        Raises:
            CheckpointError: the key is not there, is no tensor, or has another shape.
        """
        stored = self.entries.get(key)
        if not isinstance(stored, StoredTensor):
            raise CheckpointError(
                f"flat_param.load: tensor '{key}' is not in the checkpoint, but the module has it. "
                "Load a checkpoint of the same model."
            )
        if shape is not None and stored.shape != shape:
            raise CheckpointError(
                f"flat_param.load: tensor '{key}' has shape {stored.shape} in the checkpoint, "
                f"but {shape} in the module. Load a checkpoint of the same model."
            )
        found, needed = stored.numel_stored, math.prod(stored.shape)
        if found < needed:
            raise CheckpointError(
                f"flat_param.load: '{key}' has {found} of its {needed} elements in the checkpoint, "
                "but all must be stored. Load a complete checkpoint."
            )
        return stored

    def places(self) -> Iterator[Place]:
        """Where everything is."""
        for entry in self.entries.values():
            if isinstance(entry, Place):
                yield entry
            else:
                yield from (chunk.place for chunk in entry.chunks)


def merge(parts: Iterable[tuple[str, Stored]], origin: Origin) -> Stored:
    """One description of all parts.

    Args:
        parts: the folder of each, relative to the common one, and what it holds.
        origin: of the whole.

    Raises:
        CheckpointError: the parts do not make up one state.
    """
    entries: dict[str, StoredTensor | Place] = {}
    chunks: dict[str, list[StoredChunk]] = {}
    for folder, part in parts:
        for key, entry in part.entries.items():
            _check_same(key, entries.get(key, entry), entry)
            if isinstance(entry, Place):
                entries[key] = _moved(entry, folder)
                continue
            entries.setdefault(key, entry)
            chunks.setdefault(key, []).extend(
                StoredChunk(c.offsets, c.sizes, _moved(c.place, folder)) for c in entry.chunks
            )
    for key, found in chunks.items():
        stored = entries[key]
        assert isinstance(stored, StoredTensor)
        entries[key] = StoredTensor(stored.dtype, stored.shape, tuple(found))
        _check_whole(key, stored.shape, found)
    return Stored(entries, origin)


def _moved(place: Place, folder: str) -> Place:
    return Place(f"{folder}/{place.path}", place.offset, place.length, place.checksum)


def _check_same(key: str, known: StoredTensor | Place, entry: StoredTensor | Place) -> None:
    first, second = (_kind(each) for each in (known, entry))
    if first[0] != second[0]:
        raise CheckpointError(
            f"flat_param.save_sharded: tensor '{key}' has shape {first[0]} on one rank and "
            f"{second[0]} on another, but ranks must save one model. "
            "Build the same model on every rank."
        )
    if first != second:
        raise CheckpointError(
            f"flat_param.save_sharded: tensor '{key}' is {first[1]} on one rank and {second[1]} on "
            "another, but ranks must save one model. "
            "Build the same model and optimizer on every rank."
        )


def _kind(entry: StoredTensor | Place) -> tuple[object, object]:
    """Shape and dtype, which a value has not."""
    return (entry.shape, entry.dtype) if isinstance(entry, StoredTensor) else ("no shape", None)


def _check_whole(key: str, shape: tuple[int, ...], chunks: Iterable[StoredChunk]) -> None:
    found, needed = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if found != needed:
        raise CheckpointError(
            f"flat_param.save_sharded: ranks have {found} elements of tensor '{key}', but it has "
            f"{needed}. Let every rank train the same parameters with the same optimizer."
        )


def check_tensor(key: str, tensor: StoredTensor) -> None:
    """Refuse rectangles that are outside of their tensor, or larger than their bytes.

    Raises:
        CheckpointError: as said.
    """
    dims = len(tensor.shape)
    for chunk in tensor.chunks:
        bounds = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=False)
        if len(chunk.offsets) != dims or len(chunk.sizes) != dims:
            reason = f"has {len(chunk.sizes)} dimensions, but the tensor has {dims}"
        elif any(offset + size > whole for offset, size, whole in bounds):
            reason = f"ends outside of the tensor's shape {tensor.shape}"
        elif math.prod(chunk.sizes) * tensor.dtype.itemsize > chunk.place.length:
            reason = f"has shape {chunk.sizes}, but only {chunk.place.length} bytes are stored"
        else:
            continue
        raise CheckpointError(
            f"flat_param.load: a stored rectangle of '{key[:80]}' {reason}. "
            "The metadata is damaged: load another checkpoint."
        )


def check_places(places: Iterable[Place]) -> dict[str, int]:
    """Refuse bytes that are claimed twice; the size that each file must have.

    Raises:
        CheckpointError: two entries overlap. What a checkpoint claims to hold is therefore never
            more than its files.
    """
    by_file: dict[str, list[tuple[int, int]]] = {}
    for place in places:
        by_file.setdefault(place.path, []).append((place.offset, place.offset + place.length))
    ends: dict[str, int] = {}
    for path, ranges in by_file.items():
        end = 0
        for start, stop in sorted(ranges):
            if start < end and start < stop:
                raise CheckpointError(
                    f"flat_param.load: the metadata claims byte {start} of '{path[:80]}' for two "
                    "entries, but entries must not overlap. It is damaged: load another "
                    "checkpoint."
                )
            end = max(end, stop)
        ends[path] = end
    return ends
