"""Reads slices of tensors from torch.distributed.checkpoint's format.

Rule 1: nothing here communicates: a process reads what it needs.
Rule 2: every element that is asked for is found exactly once, or nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import CheckpointError
from ._entries import EntryFile, Keep, Read
from ._read_ahead import ReadAhead, Stretch
from ._stored import Place, Stored, StoredChunk, StoredTensor
from ._tensor_slice import TensorSlice


def read_folder(
    folder: Path,
    stored: Stored,
    tensor_slices: Sequence[TensorSlice],
    *,
    keys: Sequence[str] = (),
    keep: Keep | None = None,
    ahead: ReadAhead | None = None,
) -> dict[str, Any]:
    """Fill slices from a checkpoint and return small values. Not a collective.

    Holds one stored rectangle at a time beside the slices. Nothing is read unless everything
    asked for is there (Rule 2). After an error, slices have other values.

    Args:
        folder: of the checkpoint.
        stored: what it holds.
        tensor_slices: to fill.
        keys: of values.
        keep: is given what is about to be filled, in another thread.
        ahead: has the disk read, and has perhaps begun.

    Raises:
        CheckpointError: something is missing, of another shape, or damaged.
    """
    reads = [read for tensor_slice in tensor_slices for read in _tensor_reads(stored, tensor_slice)]
    reads += [Read(key, _value_place(stored, key)) for key in keys]
    with closing(ReadAhead()) if ahead is None else nullcontext(ahead) as ahead:
        return _carry_out(folder, _in_order(reads), keep, ahead)


def _in_order(reads: Iterable[Read]) -> dict[str, list[Read]]:
    """By file, as they follow one another there."""
    by_file: dict[str, list[Read]] = {}
    for read in reads:
        by_file.setdefault(read.place.path, []).append(read)
    for of_file in by_file.values():
        of_file.sort(key=lambda read: read.place.offset)
    return by_file


def _carry_out(
    folder: Path, by_file: dict[str, list[Read]], keep: Keep | None, ahead: ReadAhead
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    stretches = [_stretch(folder / path, of_file) for path, of_file in by_file.items()]
    position = ahead.want(stretches)
    for stretch, of_file in zip(stretches, by_file.values(), strict=True):
        tell = partial(_tell, ahead, position - stretch.start)
        try:
            with EntryFile(stretch.path, tell) as file:
                for read, value in file.read(of_file, keep):
                    if read.chunk is None:
                        values[read.key] = value
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"flat_param.load: the data in '{stretch.path}' cannot be read "
                f"({_short(error)}), but the metadata promises it. The checkpoint is damaged, or "
                "was deleted meanwhile: load another one."
            ) from error
        position += stretch.nbytes
    return values


def _tell(ahead: ReadAhead, by: int, at: int) -> None:
    ahead.move(at + by)


def _stretch(path: Path, reads: Sequence[Read]) -> Stretch:
    """From the first byte that is read of a file to the last."""
    last = reads[-1].place
    return Stretch(path, reads[0].place.offset, last.offset + last.length)


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


def _tensor_reads(stored: Stored, tensor_slice: TensorSlice) -> Iterator[Read]:
    """What to read for one slice (Rule 2)."""
    tensor = stored.tensor(tensor_slice.key, tensor_slice.shape)
    if not torch.can_cast(tensor.dtype, tensor_slice.elements.dtype):
        raise CheckpointError(
            f"flat_param.load: tensor '{tensor_slice.key}' is {tensor.dtype} in the checkpoint "
            f"and {tensor_slice.elements.dtype} in the module, but one cannot be converted to the "
            "other without losing its kind. Load a checkpoint of the same model."
        )
    reads: dict[Place, Read] = {}
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
                chunk.place, Read(tensor_slice.key, chunk.place, chunk, tensor.dtype)
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
