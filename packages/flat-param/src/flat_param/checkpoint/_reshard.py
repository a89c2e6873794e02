"""Reshards a checkpoint for another number of ranks, offline.

No process group, no model: one process makes the new parts one after the other, and holds one of
them and one stored rectangle at a time.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from .._errors import CheckpointError
from ..dcp._checkpoint import commit, remove_leftovers, remove_part, write_part
from ..dcp._dcp_metadata import parse_metadata, read_bytes
from ..dcp._dcp_read import read_folder
from ..dcp._saved_keys import MODEL, STATE, nested_path
from ..dcp._saved_layout import SavedSegment
from ..dcp._stored import Origin, Stored, StoredTensor
from ..dcp._tensor_slice import TensorSlice, whole
from ..layout._boundary import boundaries_of, numel_of_block
from ..layout._layout import plan_segments
from ..layout._param_shard import ParamShard, make_param_shards
from ..layout._shard import plan_shard
from ..layout._spec import ParamSpec
from ._block_rows import BlockRows, block_rows
from ._optim_state import is_cut


def reshard_checkpoint(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, world_size: int
) -> None:
    """Cut a checkpoint for `world_size` ranks. Needs neither the model nor a process group.

    Peak memory: one new part, plus the largest stored rectangle.

    Args:
        source: a folder in torch.distributed.checkpoint's format; FSDP2's is cut as one unit.
        destination: another folder; its previous contents stay intact until the new parts are
            there.
        world_size: number of ranks that will load it.

    Raises:
        CheckpointError: the source is incomplete or damaged, or both folders are the same.
    """
    old, new = Path(source), Path(destination)
    if old.resolve() == new.resolve():
        raise CheckpointError(
            f"flat_param.reshard_checkpoint: source and destination are both '{old}', but the "
            "source must stay intact until the end. Name another destination."
        )
    data = read_bytes(old)
    try:
        _reshard(old, new, parse_metadata(old, data), world_size)
    except CheckpointError as error:
        if read_bytes(old) == data:
            raise
        raise CheckpointError(
            f"flat_param.reshard_checkpoint: '{old}' was replaced while it was read, but all parts "
            "are made of one checkpoint. A save is under way: try again when it is over."
        ) from error


def _reshard(old: Path, new: Path, stored: Stored, world_size: int) -> None:
    remove_leftovers(new)
    segments = _segments(stored)
    origin = Origin(uuid.uuid4().hex[:12], world_size, None, segments)
    parts = [replace(origin, rank=rank) for rank in range(world_size)]
    try:
        commit(new, origin, [_write_part(old, new, stored, part) for part in parts])
    except BaseException:
        for part in parts:
            remove_part(new, part)
        raise


def _segments(stored: Stored) -> tuple[SavedSegment, ...]:
    """How the source was cut, or one unit of everything where it does not say."""
    if stored.origin is not None:
        return stored.origin.segments
    specs = [
        ParamSpec(key.removeprefix(MODEL), entry.shape, entry.dtype)
        for key, entry in stored.entries.items()
        if isinstance(entry, StoredTensor) and not key.startswith("optim.")
    ]
    return tuple(SavedSegment(segment.layout, "element") for segment in plan_segments(specs))


def _write_part(old: Path, new: Path, stored: Stored, part: Origin) -> str:
    cut, in_rows = _cut_keys(stored, part.segments), _row_keys(stored, part.segments)
    tensor_slices = [*_slices(stored, cut, part), *_row_slices(stored, in_rows, part)]
    keys: list[str] = []
    if part.rank == 0:
        rest = [key for key in stored.entries if key not in cut and key not in in_rows]
        tensor_slices += [target for key in rest for target in _whole_target(stored, key)]
        keys = [key for key in rest if not isinstance(stored.entries[key], StoredTensor)]
    values = read_folder(old, stored, tensor_slices, keys=keys)
    return write_part(new, tensor_slices, values, part)


def _cut_keys(stored: Stored, segments: Iterable[SavedSegment]) -> dict[str, ParamSpec]:
    """Every key that is cut like a parameter: its names, and optimizer state of its shape."""
    specs = {name: spec for seg in segments for spec in seg.layout.specs for name in spec.names}
    cut: dict[str, ParamSpec] = {}
    for key, entry in stored.entries.items():
        word = ""
        name = key.removeprefix(MODEL)
        if key.startswith(STATE):
            _, _, name, word = nested_path(key)
        spec = specs.get(name)
        if spec is None or not isinstance(entry, StoredTensor):
            continue
        if is_cut(word, entry.shape, spec.shape):
            cut[key] = spec
    return cut


def _row_keys(stored: Stored, segments: Iterable[SavedSegment]) -> dict[str, str]:
    """Every key of optimizer state with a row for each block of a parameter, and whose it is."""
    totals = {spec.name: total for seg in segments for spec, total in _block_counts(seg)}
    shapes = {spec.name: spec.shape for seg in segments for spec in seg.layout.specs}
    found: dict[str, str] = {}
    for key, entry in stored.entries.items():
        if not key.startswith(STATE) or not isinstance(entry, StoredTensor):
            continue
        _, _, name, word = nested_path(key)
        of_shape = word == "step" or is_cut(word, entry.shape, shapes.get(name, ()))
        if not of_shape and totals.get(name) and entry.shape[:1] == (totals[name],):
            found[key] = name
    return found


def _block_counts(segment: SavedSegment) -> Iterator[tuple[ParamSpec, int]]:
    specs = segment.layout.specs
    each = boundaries_of(segment.boundary, [spec.name for spec in specs])
    for spec, boundary in zip(specs, each, strict=True):
        size = numel_of_block(spec.shape, spec.stride, boundary)
        yield spec, -(-spec.numel // size) if size else 0


def _row_slices(stored: Stored, in_rows: dict[str, str], part: Origin) -> Iterator[TensorSlice]:
    pieces, rows = _pieces(part)
    for key, name in in_rows.items():
        tensor, own = stored.tensor(key), rows[name]
        if own is not None:
            memory = torch.empty(own.count, *tensor.shape[1:], dtype=tensor.dtype)
            yield own.slice_of(key, memory)
        elif pieces[name].numel:
            yield whole(key, torch.empty(tensor.shape, dtype=tensor.dtype))


def _pieces(part: Origin) -> tuple[dict[str, ParamShard], dict[str, BlockRows | None]]:
    """What a rank has of each parameter, and which of its blocks."""
    pieces: dict[str, ParamShard] = {}
    rows: dict[str, BlockRows | None] = {}
    for segment in part.segments:
        plan = plan_shard(segment.layout, world_size=part.world_size, boundary=segment.boundary)
        for index, piece in enumerate(make_param_shards(plan, part.rank or 0)):
            pieces[piece.spec.name] = piece
            rows[piece.spec.name] = block_rows(plan, index, piece.start, piece.stop)
    return pieces, rows


def _slices(stored: Stored, cut: dict[str, ParamSpec], part: Origin) -> Iterator[TensorSlice]:
    pieces, _ = _pieces(part)
    for key, spec in cut.items():
        piece = pieces[spec.name]
        if piece.numel or (not part.rank and not spec.numel):
            dtype = stored.tensor(key).dtype
            yield TensorSlice(key, spec, piece.start, torch.empty(piece.numel, dtype=dtype))


def _whole_target(stored: Stored, key: str) -> Iterator[TensorSlice]:
    if isinstance(stored.entries[key], StoredTensor):
        entry = stored.tensor(key)
        yield whole(key, torch.empty(entry.shape, dtype=entry.dtype))
