"""Edge: reads stretches of tensors from torch.distributed.checkpoint's format.

Rule 1: nothing here communicates: a process reads what it needs.
Rule 2: nothing here runs code from a file. Metadata is unpickled with a fixed list of classes,
        tensors and values with `weights_only=True`, and files outside the folder are refused.
Rule 3: what a file must hold is checked against its size before anything is read.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ._errors import CheckpointError
from ._stretch import Stretch

METADATA = ".metadata"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Rule 2."""
        if name in _ALLOWED.get(module, ()) or _is_dtype(module, name):
            return super().find_class(module, name)
        raise CheckpointError(
            f"flat_param.load: the metadata names '{module}.{name}', but only the classes of "
            "torch.distributed.checkpoint's format may be there. Do not trust this file."
        )


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint holds; runs no code from it (Rule 2), and checks its files (Rule 3).

    Raises:
        CheckpointError: no metadata, damaged metadata, or a file that is missing or too short.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _SafeUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"flat_param.load: '{folder}' has no {METADATA}, but a complete checkpoint has. "
            "A save that was cut short leaves none: load the one before."
        ) from None
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"flat_param.load: '{path}' cannot be read ({error}), but it describes the checkpoint. "
            "It is truncated or foreign: load another one."
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"flat_param.load: '{path}' holds a {type(metadata).__name__}, but a checkpoint's "
            "metadata is expected. Load another one."
        )
    _check_files(folder, metadata)
    return metadata


def _check_files(folder: Path, metadata: Metadata) -> None:
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    root = folder.resolve()
    for relative, size in needed.items():
        path = (folder / relative).resolve()
        if not path.is_relative_to(root):
            raise CheckpointError(
                f"flat_param.load: the metadata points to '{relative}', but a checkpoint's files "
                "are inside its folder. Do not trust this file."
            )
        actual = os.path.getsize(path) if path.is_file() else -1
        if actual < size:
            state = "is missing" if actual < 0 else f"has {actual} bytes"
            raise CheckpointError(
                f"flat_param.load: file '{path}' {state}, but {size} bytes are needed. "
                "The checkpoint is truncated: load another one."
            )


class _Loader(LoadPlanner):
    """Fills stretches, and collects small values."""

    def __init__(
        self, metadata: Metadata, stretches: Sequence[Stretch], keys: Sequence[str]
    ) -> None:
        self._metadata = metadata
        self._stretches = tuple(stretches)
        self._keys = tuple(keys)
        self._targets = {index: view for s in stretches for index, view in s.boxes()}
        self.values: dict[str, Any] = {}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: the targets are known from the start."""

    def create_local_plan(self) -> LoadPlan:
        """What to read, complete, or an error before anything is read."""
        items = [item for stretch in self._stretches for item in self._reads(stretch)]
        return LoadPlan(items + [_value_read(key) for key in self._keys])

    def _reads(self, stretch: Stretch) -> list[ReadItem]:
        stored = tensor_metadata(self._metadata, stretch.key, stretch.spec.shape)
        chunks = [
            ChunkStorageMetadata(index.offset or torch.Size(), view.size())
            for index, view in stretch.boxes()
        ]
        reads = create_read_items_for_chunk_list(stretch.key, stored, chunks)
        found = sum(item.lengths.numel() for item in reads)
        if found != stretch.elements.numel():
            raise CheckpointError(
                f"flat_param.load: '{stretch.key}' has {found} of the {stretch.elements.numel()} "
                "elements needed here, but all must be stored. Load a complete checkpoint."
            )
        return reads

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plan as it is."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep one small value."""
        self.values[read_item.storage_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where one rectangle goes."""
        target = self._targets[read_item.dest_index]
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the target is a view."""


def _value_read(key: str) -> ReadItem:
    zero = torch.Size((0,))
    index = MetadataIndex(key)
    return ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)


def tensor_metadata(
    metadata: Metadata, key: str, shape: tuple[int, ...] | None = None
) -> TensorStorageMetadata:
    """What is stored of one tensor.

    Raises:
        CheckpointError: the key is not there, is no tensor, or has another shape.
    """
    stored = metadata.state_dict_metadata.get(key)
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(
            f"flat_param.load: tensor '{key}' is not in the checkpoint, but the module has it. "
            "Load a checkpoint of the same model."
        )
    if shape is not None and tuple(stored.size) != shape:
        raise CheckpointError(
            f"flat_param.load: tensor '{key}' has shape {tuple(stored.size)} in the checkpoint, "
            f"but {shape} in the module. Load a checkpoint of the same model."
        )
    return stored


def read_folder(
    folder: Path,
    metadata: Metadata,
    stretches: Sequence[Stretch],
    *,
    keys: Sequence[str] = (),
) -> dict[str, Any]:
    """Fill stretches from a checkpoint and return small values. Not a collective.

    Holds one stored rectangle at a time beside the stretches. Nothing is read unless everything
    asked for is there.

    Raises:
        CheckpointError: something is missing, of another shape, or damaged.
    """
    planner = _Loader(metadata, stretches, keys)
    plan = planner.create_local_plan()
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, True)
    try:
        for item in plan.items:  # one by one: torch keeps each until it has read the next
            reader.read_data(LoadPlan([item]), planner).wait()
    except Exception as error:
        raise CheckpointError(
            f"flat_param.load: the data in '{folder}' cannot be read ({error}), but its metadata "
            "promises it. The checkpoint is damaged: load another one."
        ) from error
    return planner.values
