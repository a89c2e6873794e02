"""What a handle's flat parameter carries, under the names of torch's private class.

`FlatParamShardMetadata` has four fields in older sources and six since strides were added. It is
built from either, and the two are compared only where both sides have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import nn

from ..layout._layout import FlatLayout

_PLACES = ("_param_infos", "_shared_param_infos", "_params")
_TENSORS = ("_local_shard", "_full_param_padded")


class HandleShardingStrategy(Enum):
    """How a handle divides its flat parameter; the names of torch's private class.

    `FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD` and `HYBRID_SHARD`; see `Strategy`.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class ParamInfo(NamedTuple):
    """Where an original parameter lives."""

    param_name: str
    module: nn.Module
    module_name: str


class SharedParamInfo(NamedTuple):
    """A further place of a tied parameter, and its first ("prim") place."""

    param_name: str
    module: nn.Module
    module_name: str
    prim_param_name: str
    prim_module: nn.Module
    prim_module_name: str


class ShardParamInfo(NamedTuple):
    """What a shard holds of one parameter; indices into the parameter include the last one."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


class _MetadataFields(NamedTuple):
    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...] | None
    param_contiguities: tuple[bool, ...] | None
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class FlatParamShardMetadata(_MetadataFields):
    """What one shard holds, parameter by parameter; padding is counted in no field.

    Attributes:
        param_names: qualified names.
        param_shapes: whole shapes.
        param_strides: strides before flattening; None where the source did not record them.
        param_contiguities: whether each was contiguous; None likewise.
        param_numels: whole numels.
        param_offsets: `(first, last)` element in the shard, last included.

    Example:
        >>> FlatParamShardMetadata(["w"], [(2, 2)], [4], [(0, 3)]).param_numels
        (4,)
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> FlatParamShardMetadata:
        """Build from four fields or six, by position or by name."""
        if len(args) == 4:
            args = (*args[:2], None, None, *args[2:])
        given = dict(zip(_MetadataFields._fields, args, strict=False)) | kwargs
        fields = {"param_strides": None, "param_contiguities": None} | given
        return super().__new__(cls, **{name: _frozen(value) for name, value in fields.items()})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or len(other) not in (4, 6):
            return NotImplemented
        theirs = other if len(other) == 6 else (*other[:2], None, None, *other[2:])
        pairs = zip(self, map(_frozen, theirs), strict=True)
        return all(mine == yours for mine, yours in pairs if None not in (mine, yours))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.param_names, self.param_numels, self.param_offsets))


class FlatParameter(nn.Parameter):
    """A parameter that holds several flattened ones, with what is needed to tell them apart."""

    _num_params: int
    _shapes: tuple[torch.Size, ...]
    _strides: tuple[tuple[int, ...], ...]
    _contiguities: tuple[bool, ...]
    _fqns: tuple[str, ...]
    _numels: tuple[int, ...]
    _numels_with_padding: tuple[int, ...]
    _is_padding_mask: tuple[bool, ...]
    _shard_param_infos: tuple[ShardParamInfo, ...]
    _shard_numel_padded: int
    _sharded_size: torch.Size
    _unpadded_unsharded_size: torch.Size
    _param_infos: tuple[ParamInfo, ...]
    _shared_param_infos: tuple[SharedParamInfo, ...]
    _params: list[nn.Parameter] | None
    _local_shard: torch.Tensor
    _full_param_padded: torch.Tensor
    _layout: FlatLayout

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle values and metadata; the module the parameter belongs to stays behind."""
        skip = (*_PLACES, *_TENSORS)
        known = {name: value for name, value in vars(self).items() if name not in skip}
        return _rebuild, (self.detach(), self.requires_grad, known)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        """Copy values and metadata; likewise."""
        known = self.__reduce_ex__(2)[1][2]
        copied = memo[id(self)] = _rebuild(self.detach().clone(), self.requires_grad, known)
        return copied


def is_truly_contiguous(tensor: torch.Tensor) -> bool:
    """Contiguous, and with unit stride last, which a 1x1 channels-last kernel does not have."""
    return tensor.is_contiguous() and (tensor.dim() == 0 or tensor.stride(-1) == 1)


def _rebuild(data: torch.Tensor, requires_grad: bool, known: dict[str, Any]) -> FlatParameter:
    param = FlatParameter(data, requires_grad)
    vars(param).update(known)
    return param


def _frozen(value: Any) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, (str, torch.Size)):
        return tuple(_frozen(item) for item in value)
    return value
