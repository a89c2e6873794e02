"""The drop-in `FlatParamHandle`, for code written against torch's private class.

Rule 1: layout, shard ranges, metadata and error sentences are torch's, where they are not among the
defects listed in `docs/flat-param/design.md`. Padding is zero, not 42.
Rule 2: the process group and the device may be left out: one rank, the parameters' device.
Rule 3: after construction the module's attributes are tensors computed from `flat_param`, so
autograd reaches it; with `use_orig_params` and after `shard` they are parameters again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._errors import ParameterError, StateError
from ..comm._exit import dropped_at_exit
from ..layout._layout import DEFAULT_ALIGN_BYTES, FlatLayout, plan_layout
from ..layout._spec import ParamSpec, collect_params, spec_of
from ..memory._buffer import migrate
from ..memory._overlap import check_apart
from ..memory._owners import FLATTENED, UNIT, check_unowned
from ..memory._views import memory_order
from ._flat_parameter import (
    FlatParameter,
    HandleShardingStrategy,
    is_truly_contiguous,
)
from ._handle_memory import HandleMemory
from ._handle_places import (
    check_found,
    param_info,
    refusal,
    shared_param_infos,
)


class FlatParamHandle(HandleMemory):
    """One flat parameter made of a module's parameters, whole or sharded over ranks.

    Args:
        params: the parameters to flatten; non-empty; all of them in the module.
        fully_sharded_module: the module whose walk gives their order and names.
        device: where they are used; default: where they are.
        sharding_strategy: NO_SHARD keeps the flat parameter whole on every rank.
        offload_params: keep the shard on CPU; on a CPU device that is where it is.
        mp_param_dtype: dtype of the unsharded parameters; default: their own.
        mp_reduce_dtype: dtype in which gradients are reduced; default: `mp_param_dtype`.
        keep_low_precision_grads: kept for the signature; see `fully_shard`.
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
        check_unowned("FlatParamHandle", named, UNIT)
        check_unowned("FlatParamHandle", named, FLATTENED)
        strides = tuple(tuple(param.stride()) for param in found)
        contiguities = tuple(is_truly_contiguous(param) for param in found)
        layout = self._plan(specs, self._aligned_numel)
        requires_grad = any(param.requires_grad for param in found)
        buffer = migrate(found, layout)
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

    def flatten_tensors(self, tensors: Sequence[Tensor], aligned_numel: int) -> Tensor:
        """Copy tensors into one new flat tensor, laid out as the flat parameter is.

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
        """`flatten_tensors`, as a flat parameter without metadata."""
        return FlatParameter(self.flatten_tensors(tensors, aligned_numel), requires_grad)

    # Copying

    def _deepcopy_module(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module as one of parameters, and flatten the copy with a handle of its own."""
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
