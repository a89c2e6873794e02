"""Reads slices of tensors from torch.distributed.checkpoint's format.

Rule 1: nothing here communicates: a process reads what it needs.
Rule 2: tensors and values are read with `weights_only=True`, and only after their checksum has
        been compared, where the checkpoint has one.
Rule 3: every element that is asked for is found exactly once, or nothing is read.
Rule 4: torch reads a part of a file in a thread of ours, where no signal's handler runs: what a
        handler raises between two calls of the file, such as KeyboardInterrupt for Ctrl-C, torch
        makes a ValueError of, and a checkpoint would seem damaged.
Rule 5: checksums are compared in another thread, a few entries ahead: the file comes from the disk
        while the entries before are made tensors and copied.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._errors import CheckpointError
from ._checksum import Checksums
from ._stored import Place, Stored, StoredChunk, StoredTensor
from ._tensor_slice import TensorSlice

_RUN_BYTES, _RUNS_AHEAD = 4 << 20, 2


@dataclass
class _Read:
    """One entry of a file, and where parts of it go."""

    key: str
    place: Place
    chunk: StoredChunk | None = None
    dtype: torch.dtype | None = None
    copies: list[tuple[tuple[slice, ...], Tensor]] = field(default_factory=list)


def read_folder(
    folder: Path, stored: Stored, tensor_slices: Sequence[TensorSlice], *, keys: Sequence[str] = ()
) -> dict[str, Any]:
    """Fill slices from a checkpoint and return small values. Not a collective.

    Holds one stored rectangle at a time beside the slices. Nothing is read unless everything
    asked for is there (Rule 3).

    Raises:
        CheckpointError: something is missing, of another shape, or damaged.
    """
    reads = [read for tensor_slice in tensor_slices for read in _tensor_reads(stored, tensor_slice)]
    reads += [_Read(key, _value_place(stored, key)) for key in keys]
    by_file: dict[str, list[_Read]] = {}
    for read in reads:
        by_file.setdefault(read.place.path, []).append(read)
    values: dict[str, Any] = {}
    for path, of_file in by_file.items():
        try:
            with (
                (folder / path).open("rb") as file,
                (folder / path).open("rb") as again,
                ThreadPoolExecutor(1) as checker,
                ThreadPoolExecutor(1) as reader,  # Rule 4
            ):
                ordered = sorted(of_file, key=lambda read: read.place.offset)
                for read in _checked(ordered, file, checker):
                    _carry_out(read, again, reader, values)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"flat_param.load: the data in '{folder / path}' cannot be read "
                f"({_short(error)}), but the metadata promises it. The checkpoint is damaged, or "
                "was deleted meanwhile: load another one."
            ) from error
    return values


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _value_place(stored: Stored, key: str) -> Place:
    entry = stored.entries.get(key)
    if not isinstance(entry, Place):
        raise CheckpointError(
            f"flat_param.load: value '{key[:80]}' is not in the checkpoint, but it is needed. "
            "Load a complete checkpoint."
        )
    return entry


def _tensor_reads(stored: Stored, tensor_slice: TensorSlice) -> Iterator[_Read]:
    """What to read for one slice (Rule 3)."""
    tensor = stored.tensor(tensor_slice.key, tensor_slice.shape)
    if not torch.can_cast(tensor.dtype, tensor_slice.elements.dtype):
        raise CheckpointError(
            f"flat_param.load: tensor '{tensor_slice.key}' is {tensor.dtype} in the checkpoint and "
            f"{tensor_slice.elements.dtype} in the module, but one cannot be made of the other "
            "without loss of its kind. Load a checkpoint of the same model."
        )
    reads: dict[Place, _Read] = {}
    for offsets, view in tensor_slice.boxes():
        found = list(_overlaps(tensor, offsets, view))
        numel = sum(target.numel() for _, _, target in found)
        if numel != view.numel() or not _disjoint(view, found):
            raise CheckpointError(
                f"flat_param.load: '{tensor_slice.key}' has {numel} of the {view.numel()} elements "
                "needed here, or some of them twice, but all must be stored once. "
                "Load a complete checkpoint."
            )
        for chunk, source, target in found:
            read = reads.setdefault(
                chunk.place, _Read(tensor_slice.key, chunk.place, chunk, tensor.dtype)
            )
            read.copies.append((source, target))
    yield from reads.values()


_Overlap = tuple[StoredChunk, tuple[slice, ...], Tensor]


def _overlaps(tensor: StoredTensor, offset: tuple[int, ...], view: Tensor) -> Iterator[_Overlap]:
    """Stored rectangles that meet a wanted one: where in each, and where in the target."""
    sizes = tuple(view.shape)
    if not math.prod(sizes):
        return
    for chunk in tensor.chunks:
        source, target = [], []
        for start, size, first, length in zip(
            offset, sizes, chunk.offsets, chunk.sizes, strict=True
        ):
            begin, end = max(start, first), min(start + size, first + length)
            if begin >= end:
                break
            source.append(slice(begin - first, end - first))
            target.append(slice(begin - start, end - start))
        else:
            yield chunk, tuple(source), view[tuple(target)]


def _disjoint(view: Tensor, found: Sequence[_Overlap]) -> bool:
    """Whether no element of the target is filled twice. O(elements)."""
    if len(found) < 2:
        return True
    base, seen = view.storage_offset(), torch.zeros(view.numel(), dtype=torch.bool)
    for _, _, target in found:
        # The view is contiguous up to the order of its dimensions: its elements and those of
        # `seen` are numbered alike.
        part = seen.as_strided(target.shape, target.stride(), target.storage_offset() - base)
        if part.any():
            return False
        part.fill_(True)
    return True


def _checked(reads: Sequence[_Read], file: BinaryIO, checker: Executor) -> Iterator[_Read]:
    """The same, each when its checksum was compared; the next ones are compared meanwhile.

    Raises:
        CheckpointError: one is another.
    """
    checksums = Checksums()

    def check(few: Sequence[_Read]) -> Sequence[_Read]:
        for read in few:
            _check(read, file, checksums)
        return few

    under_way: deque[Future[Sequence[_Read]]] = deque()
    for few in _runs(reads):
        under_way.append(checker.submit(check, few))
        if len(under_way) > _RUNS_AHEAD:
            yield from under_way.popleft().result()
    while under_way:
        yield from under_way.popleft().result()


def _runs(reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    """Neighbours with enough bytes to be worth a call of another thread."""
    run: list[_Read] = []
    length = 0
    for read in reads:
        run.append(read)
        length += read.place.length
        if length >= _RUN_BYTES:
            yield run
            run, length = [], 0
    yield run


def _check(read: _Read, file: BinaryIO, checksums: Checksums) -> None:
    place = read.place
    if place.checksum is not None:
        found = checksums.of(file, place.offset, place.length)
        if found != place.checksum:
            raise CheckpointError(
                f"flat_param.load: '{read.key}' has the checksum {found:08x} in '{file.name}', "
                f"but {place.checksum:08x} was saved. The file is damaged, or of another "
                "checkpoint: load another one."
            )


def _carry_out(read: _Read, file: BinaryIO, reader: Executor, values: dict[str, Any]) -> None:
    loaded = reader.submit(_load, file, read.place).result()
    if read.chunk is None:
        values[read.key] = loaded
        return
    _check_loaded(read, loaded)
    for source, target in read.copies:
        target.copy_(loaded[source])


def _load(file: BinaryIO, place: Place) -> Any:
    part = _Part(file, place.offset, place.length)
    try:
        return torch.load(io.BufferedReader(part), map_location="cpu", weights_only=True)
    except Exception:
        if part.error is not None:  # torch goes on, and raises what comes of that
            raise part.error from None
        raise


def _check_loaded(read: _Read, loaded: Any) -> None:
    assert read.chunk is not None
    right = (
        isinstance(loaded, Tensor)
        and loaded.layout is torch.strided
        and loaded.dtype == read.dtype
        and tuple(loaded.shape) == read.chunk.sizes
    )
    if not right:
        kind = f"{loaded.dtype} of {tuple(loaded.shape)}" if isinstance(loaded, Tensor) else "no"
        raise CheckpointError(
            f"flat_param.load: the data of '{read.key}' is {kind} tensor, but the metadata says "
            f"{read.dtype} of {read.chunk.sizes}. The checkpoint is damaged: load another one."
        )


class _Part(io.RawIOBase):
    """A part of a file as a file of its own.

    Attributes:
        error: what reading the file has raised.
    """

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self.error: OSError | None = None
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._at))
        try:
            self._file.seek(self._offset + self._at)
            found: int = self._file.readinto(memoryview(buffer)[:wanted])  # type: ignore[attr-defined]
        except OSError as error:
            self.error = error
            raise
        self._at += found
        return found
