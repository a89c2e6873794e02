"""What a handle puts in the place of the module's parameters.

Rule: tensors computed from the flat parameter while it is whole, so that autograd reaches it;
parameters where something asks for parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .._errors import ParameterError, StateError
from ..memory._views import unflatten
from ._flat_parameter import FlatParameter
from ._handle_places import set_attribute


class HandleViews:
    """The side of a handle that faces the module.

    Attributes:
        flat_param: whole or sharded.
        world_size: ranks that share it.
    """

    flat_param: FlatParameter
    world_size: int
    _whole: bool
    _holds_params: bool

    @contextlib.contextmanager
    def unflatten_as_params(self) -> Iterator[None]:
        """Within, the module's attributes are parameters that share the flat memory.

        Raises:
            StateError: this rank holds a part; nothing has changed then.
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
        """`(parameter name, module name)` of every place, tied ones included."""
        for info in self.flat_param._param_infos:
            yield info.param_name, info.module_name
        yield from self.shared_param_module_names()

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """`(parameter name, module name)` of the further places of tied parameters."""
        for info in self.flat_param._shared_param_infos:
            yield info.param_name, info.module_name

    def _use_unsharded_views(self, *, as_params: bool) -> None:
        if as_params:
            self._use_sharded_views()
            return
        flat, self._holds_params = self.flat_param, False
        with torch.enable_grad():
            views = unflatten(flat, flat._layout)
        for info, fqn in zip(flat._param_infos, flat._fqns, strict=True):
            set_attribute(info.module, info.param_name, views[fqn])
        self._set_shared()

    def _use_sharded_views(self) -> None:
        """Parameters: whole where this rank has the whole, otherwise the parts it has."""
        self._holds_params = True
        for index, (info, place) in enumerate(
            zip(self.flat_param._param_infos, self._places(), strict=True)
        ):
            set_attribute(info.module, info.param_name, self._as_param(index, place))
        self._set_shared()

    def _places(self) -> list[Tensor]:
        """Where each parameter's elements lie now; outside autograd."""
        flat = self.flat_param
        source = flat.detach()
        if self._whole or self.world_size == 1:
            views = unflatten(source, flat._layout)
            return [views[fqn] for fqn in flat._fqns]
        starts = [part.offset_in_shard or 0 for part in flat._shard_param_infos]
        numels = [part.numel_in_shard or 0 for part in flat._shard_param_infos]
        return [source[start : start + numel] for start, numel in zip(starts, numels, strict=True)]

    def _as_param(self, index: int, view: Tensor) -> nn.Parameter:
        if self.flat_param._params is None:
            return nn.Parameter(view, requires_grad=self.flat_param.requires_grad)
        param = self.flat_param._params[index]
        param.data = view
        return param

    @torch.no_grad()
    def _writeback_orig_params(self) -> bool:
        """Take in parameters that were replaced, or whose storage was; whether there were any.

        Raises:
            ParameterError: one has another shape than it had; nothing has changed then.
        """
        flat = self.flat_param
        if flat._params is None or not self._holds_params:
            return False
        held = [info.module._parameters.get(info.param_name) for info in flat._param_infos]
        replaced = [
            (index, param, place)
            for index, (param, place) in enumerate(zip(held, self._places(), strict=True))
            if param is not None
            and (param is not flat._params[index] or param.data_ptr() != place.data_ptr())
        ]
        for index, param, place in replaced:
            if param.shape != place.shape:
                raise ParameterError(
                    "Cannot writeback when the parameter shape changes\n"
                    f"Expects {place.shape} but got {param.shape} for {flat._fqns[index]}"
                )
        for index, param, place in replaced:
            param.data = place.copy_(param)
            flat._params[index] = param
        return bool(replaced)

    def _set_shared(self) -> None:
        for info in self.flat_param._shared_param_infos:
            set_attribute(
                info.module, info.param_name, getattr(info.prim_module, info.prim_param_name)
            )
