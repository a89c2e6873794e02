"""Writes slices of tensors in torch.distributed.checkpoint's format, without a collective.

One process writes one folder, which is a checkpoint of its own.

Rule: a checksum is of what the file gives when it is read again, from the system's memory of it,
      and not of the tensor. A thread reads and syncs behind what is being written.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils import dlpack

from .._torch_compat import archive_around, without_storage_warning
from ._behind import Behind, EarlySync
from ._checksum import Checksums
from ._dcp_metadata import METADATA, encode_metadata
from ._saved_tensor import memory_of
from ._stored import Origin, Place, Stored, StoredChunk, StoredTensor
from ._tensor_slice import TensorSlice

DATA = "__0_0.distcp"  # as torch names the first file of its first rank
_RUN_BYTES = 4 << 20  # are worth a call of the thread


def write_folder(
    folder: Path, tensor_slices: Sequence[TensorSlice], values: Mapping[str, Any], origin: Origin
) -> Stored:
    """Write a checkpoint that holds these slices, down to the disk. Not a collective.

    Args:
        folder: new; is complete when its metadata is there.
        tensor_slices: parts of tensors.
        values: small values by key, of types that `weights_only` loading accepts, or `Serialized`.
        origin: the save that it belongs to.

    Raises:
        OSError: the disk is full, or fails; torch may make a RuntimeError of it.
    """
    folder.mkdir(parents=True)
    path = folder / DATA
    with (
        path.open("xb") as file,
        path.open("rb") as again,
        without_storage_warning(),
        closing(Behind(f"behind the writing of {path}")) as behind,
    ):
        data = _Data(file, again, behind)
        entries = list(_put_all(data, tensor_slices, values))
        checksums = iter(data.checksums())
        behind.do(partial(_to_disk, file))
        stored = Stored({key: _with(checksums, entry) for key, entry in entries}, origin)
        metadata = encode_metadata(stored)
        behind.wait()
    write_file(folder / METADATA, metadata)
    sync_folder(folder)
    return stored


class _Data:
    """The file of a part, while it is written.

    Args:
        file: to write to.
        again: the same file, to read what it has.
        behind: reads it, and syncs it.
    """

    def __init__(self, file: BinaryIO, again: BinaryIO, behind: Behind) -> None:
        self._file, self._again, self._behind = file, again, behind
        self._early, self._sums = EarlySync(file), Checksums()
        self._run: list[Place] = []  # written, and not handed to the thread
        self._handed = 0
        self._found: list[int] = []
        self._around: dict[object, tuple[bytes, bytes] | None] = {}

    def put(self, value: Any) -> Place:
        """Write a value that is no part of a tensor; its checksum is among `checksums`."""
        start = self._file.tell()
        if isinstance(value, Tensor):
            torch.save(value, self._file)
        else:
            data = value if isinstance(value, Serialized) else serialized(value)
            self._file.write(data.data)
        return self._written(start)

    def put_elements(self, view: Tensor) -> Place:
        """Write a tensor's elements alone, row-major; its checksum is among `checksums`."""
        start = self._file.tell()
        tensor = view.detach().contiguous().cpu()
        around = self._archive_around(tensor) if _is_plain(tensor) else None
        if around is None:
            torch.save(_alone(tensor), self._file)
            return self._written(start)
        head, tail = around
        memory = memory_of(tensor)
        self._file.write(head)
        for first in range(0, len(memory), _RUN_BYTES):
            self._hand_over(_RUN_BYTES)
            self._file.write(memory[first : first + _RUN_BYTES])
        self._file.write(tail)
        return self._written(start)

    def _written(self, start: int) -> Place:
        place = Place(DATA, start, self._file.tell() - start)
        self._run.append(place)
        self._hand_over(_RUN_BYTES)
        return place

    def checksums(self) -> list[int]:
        """Of all that was put, in order; waits for them."""
        self._hand_over(0)
        self._behind.wait()
        return self._found

    def _archive_around(self, tensor: Tensor) -> tuple[bytes, bytes] | None:
        """What `torch.save` writes but for its checksum: ours is of what is in the file.

        The same for all tensors that are alike, as those of a model's blocks are.
        """
        key = tensor.dtype, tensor.shape
        if key not in self._around:
            self._around[key] = archive_around(_alone(tensor))
        return self._around[key]

    def _hand_over(self, least: int) -> None:
        """Have the thread go on with what was written, where that is enough."""
        stop = self._file.tell()
        if stop - self._handed < least:
            return
        self._file.flush()
        run, self._run, self._handed = self._run, [], stop
        self._behind.do(partial(self._follow, run, stop))

    def _follow(self, run: Sequence[Place], stop: int) -> None:
        self._early.until(stop)
        for place in run:
            self._found.append(self._sums.of(self._again, place.offset, place.length))


def _is_plain(tensor: Tensor) -> bool:
    """Whether shape, dtype and a piece of the host's memory are all there is to it."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or not tensor.numel():
        return False
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _put_all(
    data: _Data, tensor_slices: Sequence[TensorSlice], values: Mapping[str, Any]
) -> Iterator[tuple[str, StoredTensor | Place]]:
    """Write everything; where it is, without checksums."""
    for tensor_slice in tensor_slices:
        chunks, tensor = [], tensor_slice.elements
        for offsets, view in tensor_slice.boxes():
            chunks.append(StoredChunk(offsets, tuple(view.shape), data.put_elements(view)))
        yield tensor_slice.key, StoredTensor(tensor.dtype, tensor_slice.shape, tuple(chunks))
    for key, value in values.items():
        yield key, data.put(value)


def _with(checksums: Iterator[int], entry: StoredTensor | Place) -> StoredTensor | Place:
    """An entry with the next checksums, one for each place."""
    if isinstance(entry, Place):
        return replace(entry, checksum=next(checksums))
    chunks = (
        replace(chunk, place=replace(chunk.place, checksum=next(checksums)))
        for chunk in entry.chunks
    )
    return replace(entry, chunks=tuple(chunks))


def _alone(tensor: Tensor) -> Tensor:
    """A contiguous tensor whose storage holds nothing else, since torch saves whole storages.

    The memory is the tensor's, where it is plain.
    """
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not _is_plain(tensor):
        return tensor.clone()
    data = dlpack.from_dlpack(tensor.view(-1).view(torch.uint8))  # another storage over its memory
    return data.view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class Serialized:
    """A value as its file will have it, whatever becomes of the value meanwhile."""

    data: bytes


def serialized(value: Any) -> Serialized:
    """A value that is no tensor, in torch's form."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return Serialized(buffer.getvalue())


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, down to the disk."""
    with path.open("xb") as file:
        file.write(data)
        _to_disk(file)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system can do that."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
