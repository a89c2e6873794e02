"""Edge: cuts a checkpoint anew for another number of ranks, offline.

No process group, no model: one process makes the new parts one after the other, and holds one of
them and one stored rectangle at a time.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ._checkpoint import commit, put_in_place, rank_folder
from ._dcp_read import read_folder, read_metadata, tensor_metadata
from ._dcp_write import write_folder
from ._errors import CheckpointError
from ._layout import plan_segments
from ._pieces import Piece, make_pieces
from ._saved_layout import FILE_NAME, SavedSegment, decode, encode
from ._shard import plan_shard
from ._sharded_save import MODEL, STATE, nested_path
from ._spec import ParamSpec
from ._stretch import Stretch, whole


def reshard_checkpoint(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, world_size: int
) -> None:
    """Cut a checkpoint for `world_size` ranks. Needs neither the model nor a process group.

    Peak memory: one new part, plus the largest stored rectangle.

    Args:
        source: a folder in torch.distributed.checkpoint's format; FSDP2's is cut as one unit.
        destination: another folder; what it held stays whole until the new parts are there.
        world_size: number of ranks that will load it.

    Raises:
        CheckpointError: the source is incomplete or damaged, or both folders are the same.
    """
    old, new = Path(source), Path(destination)
    if old.resolve() == new.resolve():
        raise CheckpointError(
            f"flat_param.reshard_checkpoint: source and destination are both '{old}', but the "
            "source must stay whole until the end. Name another destination."
        )
    metadata = read_metadata(old)
    segments = _segments(old, metadata)
    attempt = uuid.uuid4().hex[:12]
    for rank in range(world_size):
        _write_part(old, new, metadata, segments, attempt, rank, world_size)
    commit(new, attempt=attempt, world_size=world_size)


def _segments(folder: Path, metadata: Metadata) -> tuple[SavedSegment, ...]:
    """How the source was cut, or one unit of everything where it does not say."""
    for info in metadata.storage_data.values():
        path = (folder / info.relative_path).parent / FILE_NAME
        if path.is_file():
            return decode(path.read_text())
    specs = [
        ParamSpec(key.removeprefix(MODEL), tuple(stored.size), stored.properties.dtype)
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and not key.startswith("optim.")
    ]
    return tuple(SavedSegment(segment.layout, "element") for segment in plan_segments(specs))


def _write_part(
    old: Path,
    new: Path,
    metadata: Metadata,
    segments: tuple[SavedSegment, ...],
    attempt: str,
    rank: int,
    world_size: int,
) -> None:
    cut = _cut_keys(metadata, segments)
    stretches = list(_stretches(metadata, cut, segments, rank, world_size))
    keys: list[str] = []
    if rank == 0:
        rest = [key for key in metadata.state_dict_metadata if key not in cut]
        stretches += [target for key in rest for target in _whole_target(metadata, key)]
        keys = [key for key in rest if not _is_tensor(metadata, key)]
    values = read_folder(old, metadata, stretches, keys=keys)
    draft = new / f"draft-{attempt}-{rank}"
    draft.mkdir(parents=True)
    (draft / FILE_NAME).write_text(encode(segments))
    named = [*values, *(stretch.key for stretch in stretches)]
    write_folder(draft, stretches, values, paths={key: nested_path(key) for key in named})
    put_in_place(draft, rank_folder(new, attempt=attempt, rank=rank, world_size=world_size))


def _is_tensor(metadata: Metadata, key: str) -> bool:
    return isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata)


def _cut_keys(metadata: Metadata, segments: Iterable[SavedSegment]) -> dict[str, ParamSpec]:
    """Every key that is cut like a parameter: its names, and optimizer state of its shape."""
    specs = {name: spec for seg in segments for spec in seg.layout.specs for name in spec.names}
    cut: dict[str, ParamSpec] = {}
    for key, stored in metadata.state_dict_metadata.items():
        name = nested_path(key)[2] if key.startswith(STATE) else key.removeprefix(MODEL)
        spec = specs.get(name)
        if spec is None or not isinstance(stored, TensorStorageMetadata):
            continue
        if tuple(stored.size) == spec.shape and spec.shape:
            cut[key] = spec
    return cut


def _stretches(
    metadata: Metadata,
    cut: dict[str, ParamSpec],
    segments: Iterable[SavedSegment],
    rank: int,
    world_size: int,
) -> Iterator[Stretch]:
    pieces: dict[str, Piece] = {}
    for segment in segments:
        plan = plan_shard(segment.layout, world_size=world_size, boundary=segment.boundary)
        pieces.update((piece.spec.name, piece) for piece in make_pieces(plan, rank))
    for key, spec in cut.items():
        piece = pieces[spec.name]
        if piece.numel or (rank == 0 and not spec.numel):
            dtype = tensor_metadata(metadata, key).properties.dtype
            yield Stretch(key, spec, piece.start, torch.empty(piece.numel, dtype=dtype))


def _whole_target(metadata: Metadata, key: str) -> Iterator[Stretch]:
    stored = metadata.state_dict_metadata[key]
    if isinstance(stored, TensorStorageMetadata):
        yield whole(key, torch.empty(stored.size, dtype=stored.properties.dtype))
