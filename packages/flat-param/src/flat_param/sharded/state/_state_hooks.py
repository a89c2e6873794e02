"""`state_dict()` of sharded modules returns shards; `load_state_dict()` also takes whole tensors.

torch and other libraries call both on any inner module, so the hooks are on every module that has
sharded parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..._errors import FlatParamError
from ...buffers._views import memory_order
from ..tensor._piece_tensors import plain
from ..unit._by_hand import put_to_rest
from ..unit._unit import ParamSite, Unit
from ._optim_state import refuse_one_rank


def install_module_hooks(module: nn.Module, unit: Unit) -> None:
    """Add the hooks to the modules that have a unit's parameters."""
    by_registry: dict[int, list[ParamSite]] = {}
    for site in unit.sites:
        by_registry.setdefault(id(site.registry), []).append(site)
    for child in module.modules():
        sites = by_registry.get(id(child._parameters))
        if sites:
            child.register_state_dict_pre_hook(partial(_before, unit))
            child.register_state_dict_post_hook(partial(_present, unit, sites))
            child.register_load_state_dict_pre_hook(partial(_take, unit, sites))


def _before(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if unit.copies is None:
        if unit.comms.gather.world_size > 1:
            refuse_one_rank()
        put_to_rest(unit, "state_dict")


def _present(
    unit: Unit,
    sites: Sequence[ParamSite],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
) -> None:
    if unit.copies is not None:
        return
    for site in sites:
        name, param = prefix + site.key, site.param
        if isinstance(state.get(name), Tensor):
            elements = memory_order(plain(param), param.stride())
            is_plain = site.piece.is_plain
            state[name] = param.detach() if is_plain else site.piece.present(elements)


def _take(
    unit: Unit,
    sites: Sequence[ParamSite],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    put_to_rest(unit, "load_state_dict")
    unit.reshard()
    for site in sites:
        name, param = prefix + site.key, site.param
        value = state.get(name)
        if not isinstance(value, Tensor) or value is param:
            continue  # torch passes the module's own parameters for missing values
        try:
            elements = site.piece.elements(value, name)
        except FlatParamError as error:
            errors.append(str(error))
        else:
            if elements.data_ptr() != param.data_ptr():  # not read in place by load_sharded
                site.piece.flat(site.part.shard).copy_(elements.detach())
        state[name] = param
