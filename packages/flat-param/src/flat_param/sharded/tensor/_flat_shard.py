"""Sharded tensors in state dicts: the whole tensor's shape, this rank's elements.

torch's checkpoint functions gather and distribute DTensors and leave other tensors alone, so a
`FlatShard` is a DTensor. Ranks are cut at elements, rows or blocks of a flat buffer, for which
DTensor has no placement:

- `placements` is `(Replicate(),)`, which holds for the tensor that `full_tensor()` returns.
- `_local_tensor` is the 1-D piece. torch's stagers copy and fill it.
- Functions are answered as for a piece, see _piece_tensors.py: elementwise ones and reductions over
  ranks; others raise. That is in `__torch_function__`: torch 2.10 to 2.12 dispatch operators of
  DTensor subclasses in C++, past `__torch_dispatch__`.
- An unpickled shard has elements, and no process group: it is saved, and loaded where the same
  elements are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..._errors import StateError
from ..._torch_compat import (
    dtensor_spec,
    make_wrapper,
    no_torch_function,
    without_torch_function,
)
from ...buffers._dtensors import DTensorPlace, is_dtensor
from ...buffers._views import inverse
from ...layout._boxes import boxes_between
from ._callers import FILES
from ._extent import Extent, rebuild_shard
from ._piece_functions import QUESTIONS

_meshes: WeakKeyDictionary[dist.ProcessGroup, ref[DeviceMesh]] = WeakKeyDictionary()
"""Meshes that pieces hold. A mesh holds its group, so a mesh held here would keep both alive."""


def _mesh_of(group: dist.ProcessGroup | None, device_type: str) -> DeviceMesh:
    assert group is not None, "one rank alone has no shards"
    mesh = _meshes[group]() if group in _meshes else None
    if mesh is None or mesh.device_type != device_type:
        mesh = DeviceMesh.from_group(group, device_type)
        _meshes[group] = ref(mesh)
    return mesh


def _spec_of(piece: Any, extent: Extent, dtype: torch.dtype) -> Any:
    """The spec of shards of a piece; made once, since it takes longer than the shard."""
    key = extent.size, dtype, piece.device.type
    spec = piece.specs.get(key)
    if spec is None:
        mesh, size = _mesh_of(piece.comm.group, piece.device.type), torch.Size(extent.size)
        spec = dtensor_spec(mesh, (Replicate(),), size, extent.stride, dtype)
        piece.specs[key] = spec
    return spec


_COPIES = frozenset(
    {
        *(Tensor.detach, Tensor.clone, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float),
        *(Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.pin_memory),
        *(torch.empty_like, torch.zeros_like, torch.clone, torch.detach),
    }
)
"""Functions whose result has the same elements."""

aten = torch.ops.aten
_TRANSPOSES = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
_DISPATCHED = frozenset({aten.detach.default, aten.clone.default, aten._to_copy.default})


class FlatShard(DTensor):
    """This rank's elements of a sharded tensor, in a state dict. Do not create it by hand.

    `full_tensor()` gathers the tensor, and is a collective.
    """

    _extent: Extent
    _piece: Any
    _ranges: Sequence[tuple[int, int]] | None
    _views: dict[torch.Size, Tensor] | None

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        extent: Extent,
        piece: Any = None,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> FlatShard:
        """Wrap elements.

        Args:
            local: the elements, 1-D.
            extent: their place in the whole tensor.
            piece: a `ParamPiece`, which knows the ranks with the other elements; None for an
                unpickled shard.
            ranges: `[start, stop)` of each rank; None: those of the piece.
        """
        shard = make_wrapper(cls, extent.size, extent.stride, local)
        if piece is not None:
            shard._spec = _spec_of(piece, extent, local.dtype)
        shard._local_tensor, shard._extent = local, extent
        shard._piece, shard._ranges, shard._views = piece, ranges, None
        return shard

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, self = kwargs or {}, args[0] if args else None
        name = getattr(func, "__name__", "")
        if name in ("storage", "untyped_storage") and FILES.frame():
            raise _not_here("a save with safetensors", args)
        is_read = name == "__get__" and func not in _TRANSPOSES
        if is_read or name in QUESTIONS or name == "requires_grad_":
            with without_torch_function():
                return func(*args, **kwargs)
        if isinstance(self, cls):
            if func in _COPIES:
                kwargs.pop("memory_format", None)
                return self._like(func(self._local_tensor, *args[1:], **kwargs))
            if func is Tensor.new_empty and tuple(args[1]) in ((), self._extent.size):
                return self._like(self._local_tensor.new_empty(self._local_tensor.shape, **kwargs))
            if func is Tensor.copy_ and self._piece is not None:
                return self._fill(args[1])
        if all(each._piece is not None and each._ranges is None for each in _shards_in(args)):
            return _answer_as_piece(func, args, kwargs)
        raise _not_here(name or str(func), args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse calls that come from C++, except copies."""
        if func in _DISPATCHED:
            kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
            return args[0]._like(func(args[0]._local_tensor, **kwargs))
        raise _not_here(str(func), args)

    def _like(self, local: Tensor) -> FlatShard:
        return FlatShard(local, self._extent, self._piece, self._ranges)

    def _fill(self, value: Tensor) -> FlatShard:
        self._local_tensor.copy_(local_elements(value, self._extent, self._place))
        return self

    @property
    def _place(self) -> DTensorPlace | None:
        """Placement of the tensor by tensor parallelism: only elements of the parameter have it."""
        return None if self._piece is None or self._ranges is not None else self._piece.place

    def __repr__(self) -> str:  # type: ignore[override]  # DTensor's takes arguments
        return f"FlatShard('{self._extent.name}', {self._extent}, {self._local_tensor.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        return self._like(copy.deepcopy(self._local_tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_shard, (self._local_tensor, *astuple(self._extent))

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return this rank's elements, 1-D. A whole tensor that is copied into them is cut."""
        local = self._local_tensor.detach().as_subclass(_Elements)
        local._shard = self
        return local

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """The whole tensor on every rank, on the device of its elements. Collective."""
        piece, extent, local = self._piece, self._extent, self._local_tensor.detach()
        if piece is None:
            raise _not_here("full_tensor", (self,), "Load it into the rank that saved it.")
        ranges = piece.ranges() if self._ranges is None else self._ranges
        mine = local.new_zeros(max(end - start for start, end in ranges), device=piece.device)
        mine[: local.numel()].copy_(local)
        rows = mine.new_empty(len(ranges), mine.numel())
        piece.comm.all_gather(rows.view(-1).view(torch.uint8), mine.view(torch.uint8)).wait()
        found = [row[: end - start] for row, (start, end) in zip(rows, ranges, strict=True)]
        flat = torch.cat(found).to(local.device)
        # Row-major: torch broadcasts full tensors in memory order.
        whole = flat.view(extent.outer_shape).permute(inverse(extent.order)).contiguous()
        if self._place is None:
            return whole
        joined: Any = self._place.over(whole)
        gathered: Tensor = joined.full_tensor()
        return gathered

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> DTensor:
        """The whole tensor as a DTensor. Collective."""
        whole = DTensor.from_local(
            self.full_tensor(), self.device_mesh, (Replicate(),), run_check=False
        )
        return whole.redistribute(placements=placements)

    # The protocol of torch.distributed.checkpoint for tensors in rectangles.

    def _boxes(self) -> dict[torch.Size, Tensor]:
        """The rectangles of the elements, as views, by their offsets in the whole tensor."""
        if self._views is not None:
            return self._views
        extent, back = self._extent, inverse(self._extent.order)
        self._views = found = {}
        for box in boxes_between(extent.outer_shape, extent.start, extent.stop):
            at = torch.Size(
                box.offsets[back[dim]] + base for dim, base in enumerate(extent.offsets)
            )
            first = box.start - extent.start
            elements = self._local_tensor[first : first + box.numel]
            found[at] = elements.view(box.lengths).permute(back)
        return found

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, box.shape) for at, box in self._boxes().items()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._local_tensor.dtype)
        size = torch.Size(self._extent.size)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in (self.__create_chunk_list__() if self._extent.writes else ())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._boxes()[index.offset]


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


def local_elements(value: Tensor, extent: Extent, place: DTensorPlace | None) -> Tensor:
    """Return the elements of `extent`, 1-D, of any value that a state dict may have for a tensor.

    Collective if `value` is a shard with other elements, or a DTensor with another layout.
    """
    if isinstance(value, FlatShard):
        if value._extent == extent:
            return value._local_tensor
        if value._piece is None:
            raise StateError(
                f"flat_param.load_state_dict: the state of '{extent.name}' has {value._extent}, "
                f"but this rank has {extent}. It was saved by another rank, or sharded in another "
                "way. Save with torch.distributed.checkpoint or flat_param.save_sharded, which "
                "load on any rank, or save flat_param.full_state_dict."
            )
        value = value.full_tensor()
    if place is not None:
        value = place.local_of_value(value)
    elif is_dtensor(value):
        value = value.full_tensor()  # type: ignore[attr-defined]  # a DTensor
    if tuple(value.shape) != extent.shape:
        raise StateError(
            f"flat_param.load_state_dict: '{extent.name}' has shape {tuple(value.shape)} in the "
            f"state dict, but the whole tensor has {extent.size}. Load a whole, matching state."
        )
    return value.detach().permute(extent.order).reshape(-1)[extent.start : extent.stop].clone()


def _shards_in(args: Any) -> Iterator[FlatShard]:
    for each in args:
        if isinstance(each, FlatShard):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _shards_in(each)


def _answer_as_piece(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with pieces in place of shards; pieces among the results become shards."""
    pieces: Any = import_module(f"{__package__}._piece_tensors")  # by name: it imports this module
    shards: dict[int, FlatShard] = {}

    def as_pieces(value: Any) -> Any:
        if isinstance(value, FlatShard):
            piece, local = value._piece, value._local_tensor
            made = pieces.as_piece(local.as_strided(piece.piece_shape, piece.piece_stride), piece)
            shards[id(made)] = value
            return made
        if isinstance(value, (list, tuple)):
            return type(value)([as_pieces(each) for each in value])
        return value

    def as_shards(value: Any) -> Any:
        if id(value) in shards:
            return shards[id(value)]
        if isinstance(value, list):
            return [as_shards(each) for each in value]
        return pieces.present(value) if isinstance(value, pieces.Piece) else value

    given = as_pieces(args), {key: as_pieces(value) for key, value in kwargs.items()}
    return as_shards(func(*given[0], **given[1]))


def _not_here(what: str, args: Any, instead: str = "") -> StateError:
    shard = next((each for each in args if isinstance(each, FlatShard)), None)
    name = "a tensor" if shard is None else f"'{shard._extent.name}'"
    return StateError(
        f"flat_param.state_dict: {what} was called on {name} of a state dict, which has one rank's "
        "elements only. "
        + (instead or "Call full_tensor() on every rank first, or use flat_param.full_state_dict.")
    )
