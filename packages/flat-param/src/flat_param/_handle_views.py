"""Edge: what a handle puts in the place of the module's parameters.

Rule: tensors computed from the flat parameter while it is whole, so that autograd reaches it;
parameters where something asks for parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ._flat_parameter import FlatParameter
from ._handle_places import set_attribute
from ._views import unflatten


class HandleViews:
    """The side of a handle that faces the module.

    Attributes:
        flat_param: whole or sharded.
        world_size: ranks that share it.
    """

    flat_param: FlatParameter
    world_size: int
    _whole: bool

    @contextlib.contextmanager
    def unflatten_as_params(self) -> Iterator[None]:
        """Within, the module's attributes are parameters that share the flat memory."""
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
        flat = self.flat_param
        source = flat.detach() if as_params else flat
        with torch.enable_grad():
            views = unflatten(source, flat._layout)
        for index, info in enumerate(flat._param_infos):
            view = views[flat._fqns[index]]
            set_attribute(
                info.module, info.param_name, self._as_param(index, view) if as_params else view
            )
        self._set_shared()

    def _as_param(self, index: int, view: Tensor) -> nn.Parameter:
        if self.flat_param._params is None:
            return nn.Parameter(view, requires_grad=self.flat_param.requires_grad)
        param = self.flat_param._params[index]
        param.data = view
        return param

    def _use_sharded_views(self) -> None:
        flat = self.flat_param
        if self._whole or self.world_size == 1:
            self._use_unsharded_views(as_params=True)
            return
        for index, (place, part) in enumerate(
            zip(flat._param_infos, flat._shard_param_infos, strict=True)
        ):
            start, numel = part.offset_in_shard or 0, part.numel_in_shard or 0
            view = flat.detach()[start : start + numel]
            set_attribute(place.module, place.param_name, self._as_param(index, view))
        self._set_shared()

    def _set_shared(self) -> None:
        for info in self.flat_param._shared_param_infos:
            set_attribute(
                info.module, info.param_name, getattr(info.prim_module, info.prim_param_name)
            )
