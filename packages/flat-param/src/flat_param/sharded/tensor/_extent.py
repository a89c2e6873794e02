"""Elements of one rank in a tensor. Imports no DTensors, which are slow to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...buffers._views import inverse
from ...layout._spec import contiguous_stride


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

    name: str = field(compare=False)
    shape: tuple[int, ...]
    order: tuple[int, ...]
    start: int
    stop: int
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    writes: bool = field(default=True, compare=False)

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """The shape with dimensions in the order of memory."""
        return tuple(self.shape[dim] for dim in self.order)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the full tensor in memory of that order."""
        outer = contiguous_stride(tuple(self.size[dim] for dim in self.order))
        return tuple(outer[at] for at in inverse(self.order))

    def __str__(self) -> str:
        """The elements, for messages."""
        held = f"elements {self.start} to {self.stop}" if self.start < self.stop else "no element"
        return f"{held} of shape {self.shape}"


def rebuild_shard(local: Tensor, *extent: Any) -> Any:
    """Unpickle a `FlatShard`; `torch.load(weights_only=True)` may call this."""
    # By name: that module imports this one.
    return import_module(f"{__package__}._flat_shard").FlatShard(local, Extent(*extent))


torch.serialization.add_safe_globals([rebuild_shard])
