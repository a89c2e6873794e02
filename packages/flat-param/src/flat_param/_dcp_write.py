"""Edge: writes stretches of tensors in torch.distributed.checkpoint's format, without a collective.

One process writes one folder, which is a checkpoint of its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ._stretch import Stretch
from ._torch_compat import without_storage_warning


class _Saver(SavePlanner):
    """Hands stretches and small values to a storage writer."""

    def __init__(self, stretches: Sequence[Stretch], values: Mapping[str, Any]) -> None:
        self._tensors = {index: (s, view) for s in stretches for index, view in s.boxes()}
        self._values = dict(values)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: the state is known from the start."""

    def create_local_plan(self) -> SavePlan:
        """One item per rectangle and per value."""
        items = [self._tensor_item(index) for index in self._tensors]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._values]
        return SavePlan(items)

    def _tensor_item(self, index: MetadataIndex) -> WriteItem:
        stretch, view = self._tensors[index]
        data = TensorWriteData(
            ChunkStorageMetadata(index.offset or torch.Size(), view.size()),
            TensorProperties(dtype=view.dtype),
            torch.Size(stretch.spec.shape),
        )
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan as it is, and what it stores."""
        stored: dict[str, Any] = {key: BytesStorageMetadata() for key in self._values}
        for item in all_plans[0].items:
            if (data := item.tensor_data) is not None:
                empty = TensorStorageMetadata(data.properties, data.size, [])
                stored.setdefault(item.index.fqn, empty).chunks.append(data.chunk)
        return all_plans, Metadata(stored)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The bytes of one item."""
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self._values[write_item.index.fqn], buffer)
            return buffer
        return self._tensors[write_item.index][1].contiguous()


def write_folder(
    folder: Path,
    stretches: Sequence[Stretch],
    values: Mapping[str, Any],
    *,
    paths: Mapping[str, tuple[Any, ...]],
) -> None:
    """Write a checkpoint that holds these stretches. Not a collective.

    Args:
        folder: new; is complete when its metadata is there.
        stretches: parts of tensors.
        values: small values by key, of types that `weights_only` loading accepts.
        paths: where each key belongs in a nested state dict.
    """
    planner = _Saver(stretches, values)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])
    with without_storage_warning():
        results = writer.write_data(plan, planner).wait()
    metadata.planner_data = dict(paths)
    writer.finish(metadata, [results])
