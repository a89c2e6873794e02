"""The drop-in `FlatParamHandle`, for code written against torch's private class.

- Layout, shard ranges, metadata and error messages are torch's, except for the defects listed in
  `docs/flat-param/manual.md`, which also lists what is left out. Padding is zero, not 42.
- The process group and the device are optional; defaults are one rank and the parameters' device.
- After construction the module's attributes are tensors computed from `flat_param`, so autograd
  reaches it. With `use_orig_params` and after `shard` they are parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._errors import ParameterError, StateError
from .buffers._overlap import check_apart
from .buffers._owners import check_whole
from .buffers._views import allocate, move_into, param_views, unflatten
from .comm._comm import CommLog, Communicator
from .comm._exit import dropped_at_exit
from .layout._layout import DEFAULT_ALIGN_BYTES, FlatLayout, plan_layout
from .layout._spec import ParamSpec, collect_params, place_of

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "HandleShardingStrategy",
    "ParamInfo",
    "SharedParamInfo",
]


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


class FlatParamShardMetadata(NamedTuple):
    """Contents of one shard, parameter by parameter; no field counts padding.

    Attributes:
        param_names: qualified names.
        param_shapes: full shapes.
        param_strides: strides before flattening.
        param_contiguities: whether each was contiguous.
        param_numels: full numels.
        param_offsets: `(first, last)` element in the shard, last included.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int | None, int | None], ...]


class FlatParameter(nn.Parameter):
    """A parameter that holds several flattened ones, with the metadata to separate them."""

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


def _is_truly_contiguous(tensor: Tensor) -> bool:
    """Contiguous, with unit stride last, which a 1x1 channels-last kernel does not have."""
    return tensor.is_contiguous() and (tensor.dim() == 0 or tensor.stride(-1) == 1)


def _set_attribute(module: nn.Module, name: str, value: Tensor) -> None:
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
        mp_reduce_dtype: accepted and ignored, as gradients are not reduced; see `fully_shard`.
        keep_low_precision_grads: accepted and ignored.
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
        self._fwd_bwd_param_dtype = mp_param_dtype or params[0].dtype
        self._fully_sharded_module = fully_sharded_module
        # Whether `unshard` never has to gather or cast.
        self._shard_is_whole = not self.uses_sharded_strategy or (
            self.world_size == 1 and self._fwd_bwd_param_dtype == params[0].dtype
        )
        self._init_flat_param(params, fully_sharded_module)
        self._use_unsharded_views()
        fully_sharded_module.__dict__["__deepcopy__"] = self._deepcopy_module

    def __repr__(self) -> str:
        return f"FlatParamHandle(flat_param.fqns={self.flat_param._fqns})"

    def _check(self, params: Sequence[Tensor]) -> None:
        first = params[0]
        for param in params:
            if isinstance(param, FlatParameter):
                raise ParameterError("Cannot flatten a `FlatParameter`")
            if not (param.is_floating_point() or param.is_complex()):
                raise ParameterError("Cannot flatten integer dtype tensors")
            if param.dtype != first.dtype:
                raise ParameterError(
                    "Must flatten tensors with uniform dtype but got "
                    f"{first.dtype} and {param.dtype}"
                )
            if not self._use_orig_params and param.requires_grad != first.requires_grad:
                raise ParameterError(
                    "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
                )
            if param.device != first.device:
                raise ParameterError(
                    "Must flatten tensors on the same device but got both "
                    f"{first.device} and {param.device}"
                )

    def _plan(self, specs: Sequence[ParamSpec], aligned_numel: int) -> FlatLayout:
        align_bytes = max(1, aligned_numel) * specs[0].dtype.itemsize
        multiple = self.world_size if aligned_numel else 1
        return plan_layout(specs, align_bytes=align_bytes, multiple=multiple)

    def _init_flat_param(self, params: Sequence[nn.Parameter], module: nn.Module) -> None:
        wanted = {id(param) for param in params}
        others = [param for param in module.parameters() if id(param) not in wanted]
        specs, found = collect_params(module, ignored=others)
        known = {id(param) for param in found}
        missing = [
            f"params[{index}] {tuple(param.shape)}"
            for index, param in enumerate(params)
            if id(param) not in known
        ]
        if missing:
            raise ParameterError(
                "flat_param.FlatParamHandle: `params` were not found in `module`'s tree: "
                f"{', '.join(missing)}, but {type(module).__name__} must own all of them. Leave "
                "foreign parameters out."
            )
        check_apart("FlatParamHandle", module, found)
        check_whole("FlatParamHandle", zip([spec.name for spec in specs], found, strict=True))
        strides = tuple(tuple(param.stride()) for param in found)
        contiguities = tuple(map(_is_truly_contiguous, found))
        aligned = DEFAULT_ALIGN_BYTES // self._fwd_bwd_param_dtype.itemsize
        layout = self._plan(specs, aligned if self._use_orig_params else 0)
        requires_grad = any(param.requires_grad for param in found)
        buffer = allocate(layout, device=found[0].device)
        move_into(found, param_views(buffer, layout))
        flat = FlatParameter(buffer, requires_grad)
        places = {name: place_of(module, name) for spec in specs for name in spec.names}
        infos = {name: ParamInfo(key, owner, path) for name, (path, owner, key) in places.items()}
        flat._fqns = tuple(spec.name for spec in specs)
        flat._shapes = tuple(param.shape for param in found)
        flat._strides, flat._contiguities = strides, contiguities
        flat._numels = tuple(spec.numel for spec in specs)
        flat._numels_with_padding = tuple(numel for numel, _ in layout.pieces)
        flat._is_padding_mask = tuple(index < 0 for _, index in layout.pieces)
        flat._unpadded_unsharded_size = flat.size()
        flat._param_infos = tuple(infos[spec.name] for spec in specs)
        flat._shared_param_infos = tuple(
            SharedParamInfo(*infos[alias], *infos[spec.name])
            for spec in specs
            for alias in spec.aliases
        )
        flat._params = list(found) if self._use_orig_params else None
        self.flat_param: FlatParameter = flat
        self._layout, self._originals, self._whole = layout, found, True
        self._shown: tuple[list[nn.Parameter], list[Tensor]] | None = None

    def _deepcopy_module(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module with plain parameters, and flatten the copy with a separate handle."""
        module, flat = self._fully_sharded_module, self.flat_param
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
            params,
            copied,
            self.device,
            self._sharding_strategy,
            self._offload_params,
            self._fwd_bwd_param_dtype,
            process_group=self.process_group,
            use_orig_params=self._use_orig_params,
        )
        for name in flat_names:
            copied._parameters[name] = handle.flat_param
        return copied

    def _get_shard_metadata(
        self, unsharded_start_idx: int, unsharded_end_idx: int
    ) -> tuple[ShardParamInfo, ...]:
        """Return metadata of the parameters in `[start, end]` of the full flat parameter."""
        start, end = unsharded_start_idx, unsharded_end_idx
        found = []
        for first, stop in self._layout.ranges:
            if start > stop - 1 or end < first:
                found.append(ShardParamInfo(False, None, None, None, None))
                continue
            begin, last = max(start - first, 0), min(stop - 1, end) - first
            offset = max(first - start, 0)
            found.append(ShardParamInfo(True, offset, last - begin + 1, begin, last))
        return tuple(found)

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return the contents of this rank's shard, without parameters that have no part in it."""
        flat = self.flat_param
        parts = flat._shard_param_infos
        held = [index for index, part in enumerate(parts) if part.in_shard]
        return FlatParamShardMetadata(
            tuple(flat._fqns[index] for index in held),
            tuple(flat._shapes[index] for index in held),
            tuple(flat._strides[index] for index in held),
            tuple(flat._contiguities[index] for index in held),
            tuple(flat._numels[index] for index in held),
            tuple((parts[i].intra_param_start_idx, parts[i].intra_param_end_idx) for i in held),
        )

    @staticmethod
    def _get_shard(tensor: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
        """Return this rank's part, zero-padded to equal length; a copy unless it is the whole."""
        flat = tensor.reshape(-1)
        if world_size == 1:
            return flat, 0
        size = -(-flat.numel() // world_size)
        part = flat[size * rank : size * (rank + 1)]
        lacking = size - part.numel()
        return torch.nn.functional.pad(part, (0, lacking)) if lacking else part.clone(), lacking

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
        self._use_params()
        try:
            yield
        finally:
            self._use_unsharded_views()

    def _use_unsharded_views(self) -> None:
        """Set tensors that are computed from the whole flat parameter."""
        flat, self._shown = self.flat_param, None
        with torch.enable_grad():
            views = unflatten(flat, self._layout)
        for info, fqn in zip(flat._param_infos, flat._fqns, strict=True):
            _set_attribute(info.module, info.param_name, views[fqn])
        self._set_shared()

    def _use_params(self) -> None:
        """Set parameters: whole if this rank has the whole, otherwise its parts."""
        flat, views = self.flat_param, self._views_of_params()
        params = flat._params or [
            nn.Parameter(view, requires_grad=flat.requires_grad) for view in views
        ]
        self._shown = params, views
        for info, param, view in zip(flat._param_infos, params, views, strict=True):
            param.data = view
            _set_attribute(info.module, info.param_name, param)
        self._set_shared()

    def _views_of_params(self) -> list[Tensor]:
        """The elements of each parameter that are here; outside autograd."""
        flat = self.flat_param
        source = flat.detach()
        if self._whole or self.world_size == 1:
            views = unflatten(source, self._layout)
            return [views[fqn] for fqn in flat._fqns]
        starts = [part.offset_in_shard or 0 for part in flat._shard_param_infos]
        numels = [part.numel_in_shard or 0 for part in flat._shard_param_infos]
        return [source[start : start + numel] for start, numel in zip(starts, numels, strict=True)]

    def _check_not_replaced(self) -> None:
        flat, shown = self.flat_param, self._shown
        if shown is None:
            return
        for info, fqn, param, view in zip(flat._param_infos, flat._fqns, *shown, strict=True):
            now = info.module._parameters.get(info.param_name)
            if now is not param or param.data_ptr() != view.data_ptr():
                raise StateError(
                    f"flat_param.FlatParamHandle: parameter '{fqn}' or its data was replaced, but "
                    "the module's values are those of flat_param. Copy the new values into the "
                    "parameter that was there."
                )

    def _set_shared(self) -> None:
        for info in self.flat_param._shared_param_infos:
            first = getattr(info.prim_module, info.prim_param_name)
            _set_attribute(info.module, info.param_name, first)

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether ranks hold parts instead of the whole."""
        return self._sharding_strategy is not HandleShardingStrategy.NO_SHARD

    @torch.no_grad()
    def shard(self) -> None:
        """Keep only this rank's part of the flat parameter; not a collective."""
        flat, start, padded = self.flat_param, 0, 0
        if self.uses_sharded_strategy:
            shard, padded = self._get_shard(flat.detach(), self.rank, self.world_size)
            if self.world_size > 1:
                for param in self._originals:
                    param.data = param.new_empty(0)
            flat.data, start = shard, shard.numel() * self.rank
        flat._sharded_size, flat._shard_numel_padded = flat.size(), padded
        flat._shard_param_infos = self._get_shard_metadata(start, start + flat.numel() - 1)
        self._originals = ()
        self._whole = self._shard_is_whole
        if self._use_orig_params:
            self._use_params()

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

        Collective if ranks hold parts: every rank of the group calls it.

        Raises:
            StateError: a parameter or its data was replaced since `shard` or `reshard`; names it.
        """
        self._check_not_replaced()
        if self.needs_unshard():
            shard = self.flat_param._local_shard.to(self.device, self._fwd_bwd_param_dtype)
            full = shard.new_empty(shard.numel() * self.world_size)
            Communicator(self.process_group, log=CommLog()).all_gather(full, shard).wait()
            self.flat_param.data = full[: self._layout.numel]
            self._whole = True
        self._use_unsharded_views()

    def post_unshard(self) -> None:
        """Does nothing; exists for the call order of the source."""

    @torch.no_grad()
    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Keep only the shard, and free the whole in either case; not a collective."""
        if self._shard_is_whole:
            return
        self.flat_param.data, self._whole = self.flat_param._local_shard, False
        if self._use_orig_params:
            self._use_params()

    def post_reshard(self) -> None:
        """Does nothing; exists for the call order of the source."""
