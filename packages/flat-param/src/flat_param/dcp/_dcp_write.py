"""Writes slices of tensors in torch.distributed.checkpoint's format, without a collective.

One process writes one folder, which is a checkpoint of its own.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._torch_compat import without_storage_warning
from ._checksum import Checksums
from ._dcp_metadata import METADATA, encode_metadata
from ._stored import Origin, Place, Stored, StoredChunk, StoredTensor
from ._tensor_slice import TensorSlice

DATA = "__0_0.distcp"  # as torch names the first file of its first rank


def write_folder(
    folder: Path, tensor_slices: Sequence[TensorSlice], values: Mapping[str, Any], origin: Origin
) -> Stored:
    """Write a checkpoint that holds these slices, down to the disk. Not a collective.

    Args:
        folder: new; is complete when its metadata is there.
        tensor_slices: parts of tensors.
        values: small values by key, of types that `weights_only` loading accepts.
        origin: the save that it belongs to.

    Raises:
        OSError: the disk is full, or fails; torch may make a RuntimeError of it.
    """
    folder.mkdir(parents=True)
    data = folder / DATA
    with data.open("xb") as file, without_storage_warning():
        entries = dict(_written(file, tensor_slices, values))
        _to_disk(file)
    with data.open("rb") as file:
        stored = Stored(_with_checksums(entries, file), origin)
    write_file(folder / METADATA, encode_metadata(stored))
    sync_folder(folder)
    return stored


def _written(
    file: BinaryIO, tensor_slices: Sequence[TensorSlice], values: Mapping[str, Any]
) -> Iterator[tuple[str, StoredTensor | Place]]:
    for tensor_slice in tensor_slices:
        chunks, tensor = [], tensor_slice.elements
        for offsets, view in tensor_slice.boxes():
            place = _put(file, _alone(view))
            chunks.append(StoredChunk(offsets, tuple(view.shape), place))
        yield tensor_slice.key, StoredTensor(tensor.dtype, tensor_slice.spec.shape, tuple(chunks))
    for key, value in values.items():
        yield key, _put(file, value)


def _alone(view: Tensor) -> Tensor:
    """A tensor whose storage holds nothing else, since torch saves whole storages."""
    tensor = view.detach().contiguous().cpu()
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone()


def _put(file: BinaryIO, value: Any) -> Place:
    start = file.tell()
    if isinstance(value, Tensor):
        torch.save(value, file)
    else:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        file.write(buffer.getbuffer())
    return Place(DATA, start, file.tell() - start)


def _with_checksums(
    entries: Mapping[str, StoredTensor | Place], file: BinaryIO
) -> dict[str, StoredTensor | Place]:
    """The same with checksums of what the file has now."""
    checksums = Checksums()

    def summed(place: Place) -> Place:
        return replace(place, checksum=checksums.of(file, place.offset, place.length))

    result: dict[str, StoredTensor | Place] = {}
    for key, entry in entries.items():
        if isinstance(entry, Place):
            result[key] = summed(entry)
        else:
            chunks = tuple(replace(chunk, place=summed(chunk.place)) for chunk in entry.chunks)
            result[key] = replace(entry, chunks=chunks)
    return result


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
