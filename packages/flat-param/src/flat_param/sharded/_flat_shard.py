"""Sharded tensors in state dicts: the whole tensor's shape, this rank's elements.

torch's checkpoint functions gather and distribute DTensors and leave other tensors alone, so a
`FlatShard` is a DTensor. Ranks are cut at elements, rows or blocks of a flat buffer, for which
DTensor has no placement:

- `placements` is `(Replicate(),)`, which holds for the tensor that `full_tensor()` returns.
- `_local_tensor` is the 1-D piece. torch's stagers copy and fill it.
- Operators would compute with one rank's elements, so all but copies and metadata raise. The
  check is in `__torch_function__`: torch 2.10 to 2.12 dispatch operators of DTensor subclasses in
  C++, past `__torch_dispatch__`.
- A pickled shard becomes a `StoredShard`, which knows its elements and no process group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .._errors import StateError
from .._torch_compat import (
    dtensor_spec,
    make_wrapper,
    no_torch_function,
    without_torch_function,
)
from ..buffers._dtensors import DTensorPlace
from ..buffers._views import inverse
from ..comm._comm import Communicator
from ._stored_shard import (
    DISPATCHED,
    Chunks,
    Extent,
    StoredShard,
    fields_of,
    not_here,
    rebuild_shard,
    stride_of,
)

aten = torch.ops.aten


class ShardOwners:
    """The ranks with the other elements of a tensor. Copies of a shard share it.

    Args:
        comm: to these ranks.
        device: device of tensors in collectives.
        ranges: returns `[start, stop)` of each rank.
        place: placement by tensor parallelism; None without it.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        ranges: Callable[[], Sequence[tuple[int, int]]],
        place: DTensorPlace | None = None,
    ) -> None:
        self.comm, self.device, self.ranges, self.place = comm, device, ranges, place

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardOwners:
        return self

    @property
    def mesh(self) -> DeviceMesh:
        """Return a mesh of the ranks."""
        return _mesh_of(self.comm.group, self.device.type)

    def gather(self, local: Tensor, extent: Extent) -> Tensor:
        """Return the full tensor, on the device of `local`. Collective."""
        ranges = self.ranges()
        longest = max(stop - start for start, stop in ranges)
        start, stop = ranges[self.comm.rank]
        mine = torch.zeros(longest, dtype=local.dtype, device=self.device)
        mine[: stop - start].copy_(local[: stop - start])
        rows = mine.new_empty(len(ranges), longest)
        self.comm.all_gather(_as_bytes(rows.view(-1)), _as_bytes(mine)).wait()
        found = [row[: stop - start] for row, (start, stop) in zip(rows, ranges, strict=True)]
        flat = torch.cat(found).to(local.device)
        # Row-major: torch broadcasts full tensors in memory order.
        whole = flat.view(extent.outer_shape).permute(inverse(extent.order)).contiguous()
        if self.place is None:
            return whole
        joined: Any = self.place.over(whole)
        gathered: Tensor = joined.full_tensor()
        return gathered

    def cut(self, whole: Tensor, extent: Extent) -> Tensor | None:
        """Return a copy of this rank's elements; None if `whole` has another shape."""
        if self.place is not None:
            whole = self.place.local_of_value(whole)
        elif isinstance(whole, DTensor) and not isinstance(whole, FlatShard):
            whole = whole.full_tensor()
        return extent.cut(whole) if tuple(whole.shape) == extent.shape else None


_meshes: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def _mesh_of(group: dist.ProcessGroup | None, device_type: str) -> DeviceMesh:
    assert group is not None, "one rank alone has no shards"
    mesh = _meshes.get(group)
    if mesh is None or mesh.device_type != device_type:
        mesh = _meshes[group] = DeviceMesh.from_group(group, device_type)
    return mesh


_COPIES = frozenset(
    {
        *(Tensor.detach, Tensor.clone, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float),
        *(Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.pin_memory),
        *(torch.empty_like, torch.zeros_like, torch.clone, torch.detach),
    }
)
"""Functions whose result has the same elements."""

_QUESTIONS = frozenset(
    {
        *("__get__", "__set__", "__hash__", "__len__", "size", "dim", "ndimension", "numel"),
        *("nelement", "stride", "element_size", "data_ptr", "storage_offset", "untyped_storage"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_pinned", "is_shared"),
        *("get_device", "requires_grad_", "has_names"),
    }
)
"""Functions that look at no element, by name."""


class FlatShard(Chunks, DTensor):
    """This rank's elements of a sharded tensor, in a state dict. Do not create it by hand.

    `full_tensor()` gathers the tensor, and is a collective.
    """

    _owners: ShardOwners

    @staticmethod
    def __new__(cls, local: Tensor, extent: Extent, owners: ShardOwners) -> FlatShard:
        size, stride = torch.Size(extent.size), stride_of(extent)
        shard = make_wrapper(cls, size, stride, local)
        shard._spec = dtensor_spec(owners.mesh, (Replicate(),), size, stride, local.dtype)
        shard._local_tensor, shard._extent, shard._owners = local, extent, owners
        return shard

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, self = kwargs or {}, args[0] if args else None
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS:
            with without_torch_function():
                return func(*args, **kwargs)
        if isinstance(self, cls):
            if func in _COPIES:
                kwargs.pop("memory_format", None)
                return self._like(func(self._local_tensor, *args[1:], **kwargs))
            if func is Tensor.new_empty and tuple(args[1]) in ((), self._extent.size):
                return self._like(self._local_tensor.new_empty(self._local_tensor.shape, **kwargs))
            if func is Tensor.copy_:
                return self._fill(args[1])
        raise not_here(name or str(func), args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse calls that come from C++."""
        kwargs, self = dict(kwargs or {}), args[0] if args else None
        if isinstance(self, cls) and func in DISPATCHED:
            kwargs.pop("memory_format", None)
            return self._like(func(self._local_tensor, *args[1:], **kwargs))
        if isinstance(self, cls) and func is aten.copy_.default:
            return self._fill(args[1])
        raise not_here(str(func), args)

    def _like(self, local: Tensor) -> FlatShard:
        return FlatShard(local, self._extent, self._owners)

    def _fill(self, value: Tensor) -> FlatShard:
        self._local_tensor.copy_(local_elements(value, self._extent, self._owners))
        return self

    def __repr__(self) -> str:  # type: ignore[override]  # DTensor's takes arguments
        return f"FlatShard('{self._extent.name}', {self._extent}, {self._local_tensor.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        return self._like(copy.deepcopy(self._local_tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_shard, (self._local_tensor, *fields_of(self._extent))

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return this rank's elements, 1-D. A whole tensor that is copied into them is cut."""
        local = self._local_tensor.detach().as_subclass(_Elements)
        local._shard = self
        return local

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """The whole tensor on every rank. Collective."""
        return self._owners.gather(self._local_tensor.detach(), self._extent)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        """The whole tensor as a replicated DTensor. Collective."""
        if not all(placement.is_replicate() for placement in placements or ()):
            raise StateError(
                f"flat_param.state_dict: '{self._extent.name}' cannot be redistributed as "
                f"{placements}: a shard of a flat buffer is no even part of a dimension. Use "
                "full_tensor()."
            )
        return DTensor.from_local(
            self.full_tensor(), self.device_mesh, (Replicate(),), run_check=False
        )


class _Elements(Tensor):
    """The local tensor of a shard, into which torch's checkpoint code copies full tensors."""

    __torch_function__ = no_torch_function
    _shard: FlatShard

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy elements, or this rank's part of a full tensor."""
        shard = self._shard
        if tuple(other.shape) == shard._extent.size:
            shard._fill(other)
            return self
        return self.as_subclass(Tensor).copy_(other, non_blocking=non_blocking)


def local_elements(value: Tensor, extent: Extent, owners: ShardOwners) -> Tensor:
    """Return this rank's elements, 1-D, of any value that a state dict may have for a tensor.

    Collective if `value` is a shard with other elements, or a DTensor with another layout.

    Args:
        value: a whole tensor, a DTensor, a shard, or a shard that was pickled.
        extent: this rank's elements of the target tensor.
        owners: the ranks with the other elements of the target tensor.

    Raises:
        StateError: `value` has another shape, or elements of another rank.
    """
    if isinstance(value, (FlatShard, StoredShard)):
        if value._extent.same_elements(extent):
            return value._local_tensor
        if isinstance(value, StoredShard):
            raise StateError(
                f"flat_param.load_state_dict: the state of '{extent.name}' has {value._extent}, "
                f"but this rank has {extent}. It was saved by another rank, or sharded in another "
                "way. Save with torch.distributed.checkpoint or flat_param.save_sharded, which "
                "load on any rank, or save flat_param.full_state_dict."
            )
        value = value.full_tensor()
    found = owners.cut(value, extent)
    if found is None:
        raise StateError(
            f"flat_param.load_state_dict: '{extent.name}' has shape {tuple(value.shape)} in the "
            f"state dict, but the whole tensor has {extent.size}. Load a whole, matching state."
        )
    return found


def flat_view(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of a tensor in the memory order of `like`, 1-D; a view if possible."""
    with without_torch_function():  # converts a piece to a plain tensor
        tensor = tensor.detach()
    if tensor.numel() < 2 or tensor.stride() == like.stride():
        return tensor.as_strided((tensor.numel(),), (1,))
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(-1)
    strides = like.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order).reshape(-1)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
