"""Writes slices of tensors in torch.distributed.checkpoint's format, without a collective.

One process writes one folder, which is a checkpoint of its own.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils import dlpack

from .._torch_compat import archive_around, without_storage_warning
from ._checksum import Checksums
from ._dcp_metadata import METADATA, encode_metadata
from ._early_sync import EarlySync
from ._saved_tensor import memory_of
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
        values: small values by key, of types that `weights_only` loading accepts, or `Serialized`.
        origin: the save that it belongs to.

    Raises:
        OSError: the disk is full, or fails; torch may make a RuntimeError of it.
    """
    folder.mkdir(parents=True)
    path = folder / DATA
    with path.open("xb") as file, path.open("rb") as again, without_storage_warning():
        data = _Data(file, again)
        with closing(data.sync):
            entries = dict(_written(data, tensor_slices, values))
        _to_disk(file)
    stored = Stored(entries, origin)
    write_file(folder / METADATA, encode_metadata(stored))
    sync_folder(folder)
    return stored


class _Data:
    """The file of a part, while it is written.

    Args:
        file: to write to.
        again: the same file, to read what it has.
    """

    def __init__(self, file: BinaryIO, again: BinaryIO) -> None:
        self.sync = EarlySync(file)
        self._file, self._again, self._checksums = file, again, Checksums()

    def put(self, value: Any) -> Place:
        """Write a tensor or another value; its checksum is of what the file has then."""
        file, start = self._file, self._file.tell()
        if isinstance(value, Tensor):
            _save(value, file)
        else:
            file.write((value if isinstance(value, Serialized) else serialized(value)).data)
        file.flush()
        end = file.tell()
        self.sync.written(end)
        return Place(DATA, start, end - start, self._checksums.of(self._again, start, end - start))


def _save(tensor: Tensor, file: BinaryIO) -> None:
    """As `torch.save`, but for its checksum: ours is of what is in the file."""
    around = archive_around(tensor) if _fills_its_memory(tensor) else None
    if around is None:
        torch.save(tensor, file)
        return
    file.write(around[0])
    file.write(memory_of(tensor))
    file.write(around[1])


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether its storage is on the host and has its bytes and no others."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes


def _written(
    data: _Data, tensor_slices: Sequence[TensorSlice], values: Mapping[str, Any]
) -> Iterator[tuple[str, StoredTensor | Place]]:
    for tensor_slice in tensor_slices:
        chunks, tensor = [], tensor_slice.elements
        for offsets, view in tensor_slice.boxes():
            chunks.append(StoredChunk(offsets, tuple(view.shape), data.put(_alone(view))))
        yield tensor_slice.key, StoredTensor(tensor.dtype, tensor_slice.shape, tuple(chunks))
    for key, value in values.items():
        yield key, data.put(value)


def _alone(view: Tensor) -> Tensor:
    """A tensor whose storage holds nothing else, since torch saves whole storages.

    The memory is the view's where it lies on the host in one piece.
    """
    tensor = view.detach().contiguous().cpu()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
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
