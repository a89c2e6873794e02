"""A pickled shard of a state dict: its elements, and no process group.

`torch.load` makes these in any process that has imported flat_param. torch's checkpoint package,
which is slow to import, is imported only when it asks for chunks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._errors import StateError
from .._torch_compat import make_wrapper
from ..buffers._dtensors import DTensorPlace
from ..buffers._views import inverse, outer_first
from ..layout._boxes import Box, boxes_between
from ..layout._spec import ParamSpec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten


@dataclass(frozen=True)
class Extent:
    """The elements `[start, stop)`, in memory order, that one rank has of a tensor.

    Args:
        name: for messages.
        shape: of the tensor that is cut into ranges of elements.
        order: its dimensions, slowest in memory first.
        start: first element.
        stop: one past the last element.
        size: shape of the full tensor; `shape` is this rank's part after tensor parallelism.
        offsets: start of `shape` in `size`.
        writes: whether this rank writes its elements to a checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    start: int
    stop: int
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    writes: bool = True

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """The shape with dimensions in the order of memory."""
        return tuple(self.shape[dim] for dim in self.order)

    def same_elements(self, other: Extent) -> bool:
        """Whether two extents have equal tensor sizes and elements."""
        return (self.shape, self.order, self.start, self.stop, self.size, self.offsets) == (
            other.shape,
            other.order,
            other.start,
            other.stop,
            other.size,
            other.offsets,
        )

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Yield the rectangles of the elements."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in self._boxes()]

    def part(self, local: Tensor, offset: Sequence[int]) -> Tensor:
        """Return the rectangle at an offset as a view of this rank's elements."""
        for offsets, _, box in self._boxes():
            if tuple(offsets) == tuple(offset):
                elements = local[box.start - self.start : box.start - self.start + box.numel]
                return elements.view(box.lengths).permute(inverse(self.order))
        raise StateError(
            f"flat_param.state_dict: '{self.name}' has no chunk at offset {tuple(offset)} on this "
            f"rank, which holds {self}."
        )

    def _boxes(self) -> Iterator[tuple[torch.Size, torch.Size, Box]]:
        back = inverse(self.order)
        for box in boxes_between(self.outer_shape, self.start, self.stop):
            offsets = (box.offsets[at] + base for at, base in zip(back, self.offsets, strict=True))
            yield torch.Size(offsets), torch.Size(box.lengths[at] for at in back), box

    def cut(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's elements of a tensor of `shape`, 1-D."""
        return whole.detach().permute(self.order).reshape(-1)[self.start : self.stop].clone()

    def __str__(self) -> str:
        """The elements, for messages."""
        held = f"elements {self.start} to {self.stop}" if self.start < self.stop else "no element"
        return f"{held} of shape {self.shape}"


def extent_of(
    spec: ParamSpec, start: int, stop: int, place: DTensorPlace | None, name: str
) -> Extent:
    """Return the elements of a parameter that a rank has."""
    size = tuple(spec.shape) if place is None else tuple(place.shape)
    offsets = (0,) * len(size) if place is None else place.offsets
    return Extent(name, tuple(spec.shape), tuple(outer_first(spec)), start, stop, size, offsets)


class Chunks:
    """torch.distributed.checkpoint's protocol for tensors in rectangles."""

    _local_tensor: Tensor
    _extent: Extent

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        extent = self._extent
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self._local_tensor.dtype),
                    size=torch.Size(extent.size),
                ),
            )
            for chunk in (extent.chunks() if extent.writes else ())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._extent.chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._extent.part(self._local_tensor, index.offset)


DISPATCHED = frozenset(
    {
        *(aten.detach.default, aten.clone.default, aten._to_copy.default),
        *(aten.empty_like.default, aten.zeros_like.default, aten.alias.default),
    }
)


class StoredShard(Chunks, Tensor):
    """A pickled `FlatShard`: loads on a rank with the same elements."""

    @staticmethod
    def __new__(cls, local: Tensor, extent: Extent) -> StoredShard:
        shard = make_wrapper(cls, torch.Size(extent.size), stride_of(extent), local)
        shard._local_tensor, shard._extent = local, extent
        return shard

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, self = dict(kwargs or {}), args[0] if args else None
        if isinstance(self, cls) and func in DISPATCHED:
            kwargs.pop("memory_format", None)
            return StoredShard(func(self._local_tensor, *args[1:], **kwargs), self._extent)
        raise not_here(str(func), args)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredShard('{self._extent.name}', {self._extent})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredShard:
        return StoredShard(copy.deepcopy(self._local_tensor, memo), self._extent)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_shard, (self._local_tensor, *fields_of(self._extent))


def fields_of(extent: Extent) -> tuple[Any, ...]:
    one = extent
    return one.name, one.shape, one.order, one.start, one.stop, one.size, one.offsets, one.writes


def stride_of(extent: Extent) -> tuple[int, ...]:
    stride, step = [0] * len(extent.size), 1
    for dim in reversed(extent.order):
        stride[dim] = step
        step *= max(1, extent.size[dim])
    return tuple(stride)


def not_here(what: str, args: Any) -> StateError:
    shard = next((each for each in args if isinstance(each, Chunks)), None)
    name = "a tensor" if shard is None else f"'{shard._extent.name}'"
    return StateError(
        f"flat_param.state_dict: {what} was called on {name} of a state dict, which has one rank's "
        "elements only. Call full_tensor() on every rank first, or use flat_param.full_state_dict."
    )


def rebuild_shard(local: Tensor, *extent: Any) -> Tensor:
    """Make a `StoredShard` of these elements; `torch.load(weights_only=True)` may call this."""
    return StoredShard(local, Extent(*extent))


torch.serialization.add_safe_globals([rebuild_shard])
