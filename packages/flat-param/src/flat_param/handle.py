"""The drop-in `FlatParamHandle`, for code written against torch's private class.

- Layout, shard ranges, metadata and error messages are torch's, except for the defects listed in
  `docs/flat-param/manual.md`. Padding is zero, not 42.
- The process group and the device are optional; defaults are one rank and the parameters' device.
- After construction the module's attributes are tensors computed from `flat_param`, so autograd
  reaches it. With `use_orig_params` and after `shard` they are parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._errors import ParameterError, StateError
from .buffers._overlap import check_apart
from .buffers._owners import check_unowned
from .buffers._views import ParamViews, allocate, memory_order, param_views, unflatten
from .comm._comm import CommLog, Communicator
from .comm._exit import dropped_at_exit
from .layout._layout import DEFAULT_ALIGN_BYTES, FlatLayout, plan_layout
from .layout._spec import ParamSpec, collect_params, place_of, spec_of

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "HandleShardingStrategy",
    "ParamInfo",
    "SharedParamInfo",
]

_PLACES = ("_param_infos", "_shared_param_infos", "_params")
_TENSORS = ("_local_shard", "_full_param_padded")


class HandleShardingStrategy(Enum):
    """How a handle divides its flat parameter; the names are those of torch's private class.

    `FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD` and `HYBRID_SHARD` mean what they mean in FSDP1.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class ParamInfo(NamedTuple):
    """The location of an original parameter."""

    param_name: str
    module: nn.Module
    module_name: str


class SharedParamInfo(NamedTuple):
    """Another location of a tied parameter, and its first ("prim") location."""

    param_name: str
    module: nn.Module
    module_name: str
    prim_param_name: str
    prim_module: nn.Module
    prim_module_name: str


class ShardParamInfo(NamedTuple):
    """The part of one parameter in a shard; indices into the parameter include the last one."""

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
    """Contents of one shard, parameter by parameter; no field counts padding.

    Attributes:
        param_names: qualified names.
        param_shapes: full shapes.
        param_strides: strides before flattening; None if the source did not record them.
        param_contiguities: whether each was contiguous; None likewise.
        param_numels: full numels.
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
    """A parameter that holds several flattened ones, with the metadata to separate them."""

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
        """Pickle values and metadata, without the module of the parameter."""
        skip = (*_PLACES, *_TENSORS)
        known = {name: value for name, value in vars(self).items() if name not in skip}
        return _rebuild, (self.detach(), self.requires_grad, known)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        """Copy values and metadata, without the module of the parameter."""
        known = self.__reduce_ex__(2)[1][2]
        copied = memo[id(self)] = _rebuild(self.detach().clone(), self.requires_grad, known)
        return copied


def is_truly_contiguous(tensor: torch.Tensor) -> bool:
    """Contiguous, with unit stride last, which a 1x1 channels-last kernel does not have."""
    return tensor.is_contiguous() and (tensor.dim() == 0 or tensor.stride(-1) == 1)


def _rebuild(data: torch.Tensor, requires_grad: bool, known: dict[str, Any]) -> FlatParameter:
    param = FlatParameter(data, requires_grad)
    vars(param).update(known)
    return param


def _frozen(value: Any) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, (str, torch.Size)):
        return tuple(_frozen(item) for item in value)
    return value


def refusal(first: Tensor, tensor: Tensor, *, same_grad: bool) -> str:
    """Return why two tensors cannot share a flat parameter, in torch's words; "" if they can."""
    if isinstance(tensor, FlatParameter):
        return "Cannot flatten a `FlatParameter`"
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return "Cannot flatten integer dtype tensors"
    if tensor.dtype != first.dtype:
        return f"Must flatten tensors with uniform dtype but got {first.dtype} and {tensor.dtype}"
    if same_grad and tensor.requires_grad != first.requires_grad:
        return "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
    if tensor.device != first.device:
        return (
            "Must flatten tensors on the same device but got both "
            f"{first.device} and {tensor.device}"
        )
    return ""


def check_found(
    params: Sequence[nn.Parameter], found: Sequence[nn.Parameter], module: nn.Module
) -> None:
    """Refuse parameters that the module does not own.

    Raises:
        ParameterError: lists them by position and shape.
    """
    known = {id(param) for param in found}
    missing = [index for index, param in enumerate(params) if id(param) not in known]
    if missing:
        shapes = ", ".join(f"params[{index}] {tuple(params[index].shape)}" for index in missing)
        raise ParameterError(
            f"flat_param.FlatParamHandle: `params` were not found in `module`'s tree: {shapes}, "
            f"but {type(module).__name__} must own all of them. Leave foreign parameters out."
        )


def shard_part(first: int, last: int, start: int, end: int) -> ShardParamInfo:
    """Return the part of a parameter at `[first, last]` that lies in `[start, end]`."""
    if not (start <= last and end >= first):
        return ShardParamInfo(False, None, None, None, None)
    begin, stop = max(start - first, 0), min(last, end) - first
    return ShardParamInfo(True, max(first - start, 0), stop - begin + 1, begin, stop)


def param_info(module: nn.Module, name: str) -> ParamInfo:
    """Return the location of a qualified name."""
    path, owner, attribute = place_of(module, name)
    return ParamInfo(attribute, owner, path)


def shared_param_infos(
    module: nn.Module, specs: Sequence[ParamSpec]
) -> tuple[SharedParamInfo, ...]:
    """Return the further locations of tied parameters."""
    return tuple(
        SharedParamInfo(*param_info(module, alias), *param_info(module, spec.name))
        for spec in specs
        for alias in spec.aliases
    )


def set_attribute(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter by a tensor, or a tensor by a parameter."""
    if hasattr(module, name):
        delattr(module, name)
    setattr(module, name, value)


class FlatParamHandle:
    """One flat parameter made of a module's parameters, whole or sharded over ranks.

    Args:
        params: the parameters to flatten; non-empty; all of them in the module.
        fully_sharded_module: the module whose walk gives their order and names.
        device: where they are used; default: their device.
        sharding_strategy: NO_SHARD keeps the flat parameter whole on every rank.
        offload_params: keep the shard on CPU; no effect on a CPU device.
        mp_param_dtype: dtype of the unsharded parameters; default: their own.
        mp_reduce_dtype: dtype in which gradients are reduced; default: `mp_param_dtype`.
        keep_low_precision_grads: accepted and ignored; see `fully_shard`.
        process_group: ranks that share the parameters; default: this one alone.
        use_orig_params: keep the original parameter objects, aligned to 16 bytes each.
        fsdp_extension: must be None.

    Raises:
        ParameterError: empty list, foreign, integer or mixed parameters; the module is unchanged.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(3, 7, bias=False)
        >>> handle = FlatParamHandle(list(layer.parameters()), layer)
        >>> handle.flat_param.shape
        torch.Size([21])
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        fully_sharded_module: nn.Module,
        device: torch.device | None = None,
        sharding_strategy: HandleShardingStrategy = HandleShardingStrategy.FULL_SHARD,
        offload_params: bool = False,
        mp_param_dtype: torch.dtype | None = None,
        mp_reduce_dtype: torch.dtype | None = None,
        keep_low_precision_grads: bool = False,
        process_group: dist.ProcessGroup | None = None,
        use_orig_params: bool = False,
        *,
        fsdp_extension: None = None,
    ) -> None:
        params = list(params)
        if not params:
            name = type(self).__name__
            raise ParameterError(f"Cannot construct a {name} with an empty parameter list")
        if fsdp_extension is not None:
            raise ParameterError(
                "flat_param.FlatParamHandle: fsdp_extension is given, but tensor-parallel "
                "parameters are not flattened here. Flatten their local tensors."
            )
        self._arguments: dict[str, Any] = {
            "device": device,
            "sharding_strategy": sharding_strategy,
            "offload_params": offload_params,
            "mp_param_dtype": mp_param_dtype,
            "mp_reduce_dtype": mp_reduce_dtype,
            "keep_low_precision_grads": keep_low_precision_grads,
            "use_orig_params": use_orig_params,
        }
        self._use_orig_params = use_orig_params
        self._sharding_strategy = sharding_strategy
        self._offload_params = offload_params
        self._check(params)
        self.device: torch.device = params[0].device if device is None else torch.device(device)
        self.process_group = process_group
        if process_group is not None:
            dropped_at_exit(self, "process_group")
        self.rank: int = 0 if process_group is None else process_group.rank()
        self.world_size: int = 1 if process_group is None else process_group.size()
        self._orig_param_dtype = params[0].dtype
        self._fwd_bwd_param_dtype = mp_param_dtype or self._orig_param_dtype
        self._reduce_dtype = mp_reduce_dtype or self._fwd_bwd_param_dtype
        self._keep_low_precision_grads = keep_low_precision_grads
        aligned = DEFAULT_ALIGN_BYTES // self._fwd_bwd_param_dtype.itemsize
        self._aligned_numel = aligned if use_orig_params else 0
        self._fully_sharded_module = fully_sharded_module
        self._init_flat_param(params, fully_sharded_module)
        self._use_unsharded_views(as_params=False)
        fully_sharded_module.__dict__["__deepcopy__"] = self._deepcopy_module

    def __repr__(self) -> str:
        return f"FlatParamHandle(flat_param.fqns={self.flat_param._fqns})"

    # Flattening

    def _check(self, params: Sequence[Tensor]) -> None:
        first = params[0]
        for param in params:
            reason = refusal(first, param, same_grad=not self._use_orig_params)
            if reason:
                raise ParameterError(reason)

    def _plan(self, specs: Sequence[ParamSpec], aligned_numel: int) -> FlatLayout:
        if aligned_numel < 0:
            raise ParameterError(f"Expects non-negative `aligned_numel` but got {aligned_numel}")
        align_bytes = max(1, aligned_numel) * specs[0].dtype.itemsize
        multiple = self.world_size if aligned_numel else 1
        return plan_layout(specs, align_bytes=align_bytes, multiple=multiple)

    def _init_flat_param(self, params: Sequence[nn.Parameter], module: nn.Module) -> None:
        wanted = {id(param) for param in params}
        others = [param for param in module.parameters() if id(param) not in wanted]
        specs, found = collect_params(module, ignored=others)
        check_found(params, found, module)
        check_apart("FlatParamHandle", module, found)
        named = [(spec.name, param) for spec, param in zip(specs, found, strict=True)]
        check_unowned("FlatParamHandle", named)
        strides = tuple(tuple(param.stride()) for param in found)
        contiguities = tuple(is_truly_contiguous(param) for param in found)
        layout = self._plan(specs, self._aligned_numel)
        requires_grad = any(param.requires_grad for param in found)
        buffer = allocate(layout, device=found[0].device)
        ParamViews(found, param_views(buffer, layout)).take_all()
        flat = FlatParameter(buffer, requires_grad)
        self.flat_param: FlatParameter = flat
        flat._layout = layout
        flat._num_params = len(specs)
        flat._fqns = tuple(spec.name for spec in specs)
        flat._shapes = tuple(param.shape for param in found)
        flat._strides, flat._contiguities = strides, contiguities
        flat._numels = tuple(spec.numel for spec in specs)
        flat._numels_with_padding = tuple(numel for numel, _ in layout.pieces)
        flat._is_padding_mask = tuple(index < 0 for _, index in layout.pieces)
        flat._unpadded_unsharded_size = flat.size()
        flat._param_infos = tuple(param_info(module, spec.name) for spec in specs)
        flat._shared_param_infos = shared_param_infos(module, specs)
        flat._params = list(found) if self._use_orig_params else None
        self._originals, self._whole = found, True
        self._held: ParamViews | None = None  # while the module has parameters

    def flatten_tensors(self, tensors: Sequence[Tensor], aligned_numel: int) -> Tensor:
        """Copy tensors into one new flat tensor with the layout of the flat parameter.

        Raises:
            ParameterError: empty, negative alignment, or tensors that cannot share a tensor.
        """
        if not tensors:
            raise ParameterError("Expects non-empty `tensors`")
        self._check(tensors)
        specs = [spec_of(str(index), tensor) for index, tensor in enumerate(tensors)]
        layout = self._plan(specs, aligned_numel)
        flat = torch.zeros(layout.numel, dtype=layout.dtype, device=tensors[0].device)
        for tensor, spec, (start, stop) in zip(tensors, specs, layout.ranges, strict=True):
            flat[start:stop] = memory_order(tensor.detach(), spec)
        return flat

    def flatten_tensors_into_flat_param(
        self, tensors: Sequence[Tensor], aligned_numel: int, requires_grad: bool
    ) -> FlatParameter:
        """`flatten_tensors`, returned as a flat parameter without metadata."""
        return FlatParameter(self.flatten_tensors(tensors, aligned_numel), requires_grad)

    # Copying

    def _deepcopy_module(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module with plain parameters, and flatten the copy with a separate handle."""
        module, flat = self._fully_sharded_module, self.flat_param
        if not self._whole:
            raise StateError(
                "flat_param.FlatParamHandle: the module is sharded, but a copy needs whole "
                "parameters. Call unshard() first."
            )
        flat_names = [name for name, value in module._parameters.items() if value is flat]
        own = module.__dict__.pop("__deepcopy__")
        try:
            with self.unflatten_as_params():
                for name in flat_names:
                    del module._parameters[name]
                copied = copy.deepcopy(module, memo)
        finally:
            module.__dict__["__deepcopy__"] = own
            for name in flat_names:
                module._parameters[name] = flat
        params = [copied.get_parameter(fqn) for fqn in flat._fqns]
        handle = FlatParamHandle(
            params, copied, process_group=self.process_group, **self._arguments
        )
        for name in flat_names:
            copied._parameters[name] = handle.flat_param
        return copied

    # Shards

    def _init_shard_metadata(self, padded: int, start: int, end: int) -> None:
        flat = self.flat_param
        flat._sharded_size = flat.size()
        flat._shard_numel_padded = padded
        flat._shard_param_infos = self._get_shard_metadata(start, end)

    def _get_shard_metadata(
        self, unsharded_start_idx: int, unsharded_end_idx: int
    ) -> tuple[ShardParamInfo, ...]:
        """Return metadata of the parameters in `[start, end]` of the full flat parameter."""
        return tuple(
            shard_part(first, stop - 1, unsharded_start_idx, unsharded_end_idx)
            for first, stop in self.flat_param._layout.ranges
        )

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return the contents of this rank's shard, without parameters that have no part in it."""
        flat = self.flat_param
        held = [index for index, info in enumerate(flat._shard_param_infos) if info.in_shard]
        parts = [flat._shard_param_infos[index] for index in held]
        return FlatParamShardMetadata(
            [flat._fqns[index] for index in held],
            [flat._shapes[index] for index in held],
            [flat._strides[index] for index in held],
            [flat._contiguities[index] for index in held],
            [flat._numels[index] for index in held],
            [(part.intra_param_start_idx, part.intra_param_end_idx) for part in parts],
        )

    def _get_flat_param_offsets(self) -> list[tuple[int, int]]:
        """Return `(first, last)` of every range, padding included."""
        ends = [0]
        for numel in self.flat_param._numels_with_padding:
            ends.append(ends[-1] + numel)
        return [(start, stop - 1) for start, stop in pairwise(ends)]

    @staticmethod
    def _get_unpadded_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """Return this rank's part of a flat tensor as a view, and how many elements it lacks."""
        flat = tensor.reshape(-1)
        size = -(-flat.numel() // world_size)
        part = flat[size * rank : size * (rank + 1)]
        return part, size - part.numel()

    @staticmethod
    def _get_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """Return this rank's part, zero-padded to equal length; a copy unless it is the whole."""
        part, lacking = FlatParamHandle._get_unpadded_shard(tensor, rank, world_size)
        if world_size == 1:
            return part, 0
        return torch.nn.functional.pad(part, (0, lacking)) if lacking else part.clone(), lacking

    @staticmethod
    def _get_sharded_size(tensor: Tensor, rank: int, world_size: int) -> torch.Size:
        """Return the size of a rank's part, padding included."""
        return torch.Size([-(-tensor.numel() // world_size)])

    @property
    def _fqns_in_shard(self) -> list[str]:
        flat = self.flat_param
        infos = zip(flat._fqns, flat._shard_param_infos, strict=True)
        return [fqn for fqn, info in infos if info.in_shard]

    # Views

    @contextlib.contextmanager
    def unflatten_as_params(self) -> Iterator[None]:
        """Context in which the module's attributes are parameters that share the flat memory.

        Raises:
            StateError: this rank holds only a part; then nothing has changed.
        """
        if not self._whole and self.world_size > 1:
            raise StateError(
                "flat_param.FlatParamHandle: the module is sharded, but unflatten_as_params needs "
                "whole parameters. Call unshard() first."
            )
        self._use_unsharded_views(as_params=True)
        try:
            yield
        finally:
            self._use_unsharded_views(as_params=False)

    def param_module_names(self) -> Iterator[tuple[str, str]]:
        """Yield `(parameter name, module name)` of every location, tied ones included."""
        for info in self.flat_param._param_infos:
            yield info.param_name, info.module_name
        yield from self.shared_param_module_names()

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """Yield `(parameter name, module name)` of the further locations of tied parameters."""
        for info in self.flat_param._shared_param_infos:
            yield info.param_name, info.module_name

    def _use_unsharded_views(self, *, as_params: bool) -> None:
        if as_params:
            self._use_sharded_views()
            return
        flat, self._held = self.flat_param, None
        with torch.enable_grad():
            views = unflatten(flat, flat._layout)
        for info, fqn in zip(flat._param_infos, flat._fqns, strict=True):
            set_attribute(info.module, info.param_name, views[fqn])
        self._set_shared()

    def _use_sharded_views(self) -> None:
        """Set parameters: whole if this rank has the whole, otherwise its parts."""
        flat, views = self.flat_param, self._views_of_params()
        params = flat._params or [
            nn.Parameter(view, requires_grad=flat.requires_grad) for view in views
        ]
        self._held = ParamViews(params, views)
        for index, info in enumerate(flat._param_infos):
            self._held.attach(index)
            set_attribute(info.module, info.param_name, params[index])
        self._set_shared()

    def _views_of_params(self) -> list[Tensor]:
        """The elements of each parameter that are here; outside autograd."""
        flat = self.flat_param
        source = flat.detach()
        if self._whole or self.world_size == 1:
            views = unflatten(source, flat._layout)
            return [views[fqn] for fqn in flat._fqns]
        starts = [part.offset_in_shard or 0 for part in flat._shard_param_infos]
        numels = [part.numel_in_shard or 0 for part in flat._shard_param_infos]
        return [source[start : start + numel] for start, numel in zip(starts, numels, strict=True)]

    def _writeback_orig_params(self) -> bool:
        """Copy parameters whose object or storage was replaced; return whether there were any.

        Raises:
            ParameterError: a shape has changed; then nothing is copied.
        """
        flat, held = self.flat_param, self._held
        if flat._params is None or held is None:
            return False
        current = [info.module._parameters.get(info.param_name) for info in flat._param_infos]
        moved = set(held.moved())
        replaced = [
            (index, param)
            for index, param in enumerate(current)
            if param is not None and (param is not held.params[index] or index in moved)
        ]
        for index, param in replaced:
            if param.shape != held.views[index].shape:
                raise ParameterError(
                    "Cannot writeback when the parameter shape changes\n"
                    f"Expects {held.views[index].shape} but got {param.shape} for "
                    f"{flat._fqns[index]}"
                )
        for index, param in replaced:
            flat._params[index] = held.params[index] = param
            held.take(index, param)
        return bool(replaced)

    def _set_shared(self) -> None:
        for info in self.flat_param._shared_param_infos:
            set_attribute(
                info.module, info.param_name, getattr(info.prim_module, info.prim_param_name)
            )

    # Memory

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether ranks hold parts instead of the whole."""
        return self._sharding_strategy is not HandleShardingStrategy.NO_SHARD

    @property
    def _shard_is_whole(self) -> bool:
        """Whether `unshard` does nothing: one rank, and no cast."""
        if not self.uses_sharded_strategy:
            return True
        return self.world_size == 1 and self._fwd_bwd_param_dtype == self._orig_param_dtype

    @torch.no_grad()
    def shard(self) -> None:
        """Keep only this rank's part of the flat parameter; not a collective."""
        flat = self.flat_param
        if not self.uses_sharded_strategy:
            self._init_shard_metadata(0, 0, flat.numel() - 1)
        else:
            shard, padded = self._get_shard(flat.detach(), self.rank, self.world_size)
            if self.world_size > 1:
                for param in self._originals:
                    param.data = param.new_empty(0)
            flat.data = shard
            start = shard.numel() * self.rank
            self._init_shard_metadata(padded, start, start + shard.numel() - 1)
        self._originals = ()
        self._whole = self._shard_is_whole
        if self._use_orig_params:
            self._use_sharded_views()

    def init_flat_param_attributes(self) -> None:
        """Record the shard and move it to its device; call it after `shard`."""
        shard = self.flat_param.detach()
        if self._offload_params:
            shard = shard.cpu()
            shard = shard if self.device.type == "cpu" else shard.pin_memory()
        self.flat_param._local_shard = shard
        self.flat_param.data = shard

    def needs_unshard(self) -> bool:
        """Whether `unshard` would have to gather, cast or move."""
        return not self._whole

    def pre_unshard(self) -> bool:
        """Return whether `unshard` will cast or move the shard."""
        shard = self.flat_param
        return self.needs_unshard() and (
            shard.dtype != self._fwd_bwd_param_dtype or shard.device != self.device
        )

    @torch.no_grad()
    def unshard(self) -> None:
        """Make the flat parameter whole and the module's attributes views of it.

        Collective if ranks hold parts: every rank of the group calls it. With `use_orig_params`,
        values that a user assigned are copied into the flat parameter first.

        Raises:
            ParameterError: an original parameter changed its shape; names it.
        """
        self._writeback_orig_params()
        if self.needs_unshard():
            shard = self.flat_param._local_shard.to(self.device, self._fwd_bwd_param_dtype)
            full = shard.new_empty(shard.numel() * self.world_size)
            Communicator(self.process_group, log=CommLog()).all_gather(full, shard).wait()
            self.flat_param._full_param_padded = full
            numel = self.flat_param._unpadded_unsharded_size.numel()
            self.flat_param.data = full[:numel]
            self._whole = True
        self._use_unsharded_views(as_params=False)

    def post_unshard(self) -> None:
        """Does nothing; exists for the call order of the source."""

    @torch.no_grad()
    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Keep only the shard; not a collective."""
        flat = self.flat_param
        if self._shard_is_whole:
            return
        flat.data, self._whole = flat._local_shard, False
        if free_unsharded_flat_param:
            vars(flat).pop("_full_param_padded", None)
        if self._use_orig_params:
            self._use_sharded_views()

    def post_reshard(self) -> None:
        """Does nothing; exists for the call order of the source."""

    def is_sharded(self, tensor: Tensor) -> bool:
        """Whether a tensor has the size of the shard; False for NO_SHARD.

        With one rank the two sizes are equal; the answer is then whether the flat parameter is
        sharded.
        """
        if not self.uses_sharded_strategy or "_sharded_size" not in vars(self.flat_param):
            return False
        return tensor.size() == self.flat_param._sharded_size and "_full_param_padded" not in vars(
            self.flat_param
        )

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move or cast the flat parameter, like `Tensor.to`, and renew the views."""
        self._writeback_orig_params()
        self.flat_param.data = self.flat_param.to(*args, **kwargs)
        if self._whole:
            self._use_unsharded_views(as_params=self._use_orig_params)
        elif self._use_orig_params:
            self._use_sharded_views()
