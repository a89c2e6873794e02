"""Whole parameters for a while. Collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import StateError
from ..buffers._views import param_views
from ._by_hand import units_at_rest, units_below
from ._param_sites import ParamSite, wrong_shape
from ._sharded_params import ShardedParams
from ._unit import Unit


def _gather_part(part: ShardedParams) -> tuple[Tensor, ...]:
    """Whole tensors of one segment, in new memory, in the shard's own dtype. Collective."""
    full = torch.empty(part.plan.numel, dtype=part.shard.dtype, device=part.device)
    part.gather_into(full).wait()
    return param_views(full, part.segment.layout)


@contextmanager
def full_params(module: nn.Module, *, write_back: bool) -> Iterator[None]:
    """Put whole parameters in all units below a module for a while. Collective.

    A tied parameter is one parameter there, too.

    Raises:
        StateError: called during forward or backward, or inside another one.
        ParameterError: one was replaced by another shape, and is to be written back.
    """
    units = list(units_below(module))
    _refuse_inside_step(units)
    units = units_at_rest(module)
    copies = {unit: _copies_of(unit) for unit in units}
    try:
        for unit in units:
            unit.sites.show_copies(copies[unit])
        yield
    finally:
        found = {unit: unit.sites.end_copies() for unit in units}
    if write_back:
        _write_back(found)


def _copies_of(unit: Unit) -> dict[ShardedParams, tuple[nn.Parameter, ...]]:
    return {
        part: tuple(
            nn.Parameter(part.placed(index, whole), requires_grad=param.requires_grad)
            for index, (whole, param) in enumerate(zip(wholes, part.params, strict=True))
        )
        for part in unit.parts
        for wholes in (_gather_part(part),)
    }


def _write_back(found: Mapping[Unit, Sequence[tuple[ParamSite, Tensor | None]]]) -> None:
    """Take in what was at each site; all shapes are checked before anything is written."""
    written = {unit: list(_checked(unit, values)) for unit, values in found.items()}
    for unit, values in written.items():
        for site, whole in values:
            site.part.load_full(site.index, whole)
        unit.reshard()


def _checked(
    unit: Unit, values: Iterable[tuple[ParamSite, Tensor | None]]
) -> Iterator[tuple[ParamSite, Tensor]]:
    with unit.comms.telling_others():
        for site, whole in values:
            if whole is not None:
                whole = site.part.local_of_value(site.index, whole.detach())
            if whole is None or tuple(whole.shape) != site.part.pieces[site.index].spec.shape:
                raise wrong_shape(site, whole)
            yield site, whole


def _refuse_inside_step(units: list[Unit]) -> None:
    for unit in units:
        unit.schedule.settle()
    if any(unit.schedule.depth or unit.schedule.backward is not None for unit in units):
        raise StateError(
            "flat_param.whole_params: called inside forward or backward, but there the module "
            "computes with whole parameters of its own. Call it between steps."
        )


def local_state(module: nn.Module, *, live: bool = True) -> dict[str, Any]:
    """What the plain state dict has and no unit, such as buffers. Not a collective.

    Args:
        module: sharded, or with units inside.
        live: buffers themselves, to be written to, where the state dict has others' dtypes.
    """
    managed = dict(named_sites(module))
    state = module.state_dict()
    buffers = dict(module.named_buffers(remove_duplicate=False)) if live else {}
    return {k: buffers.get(k, value) for k, value in state.items() if k not in managed}


def named_sites(module: nn.Module) -> Iterator[tuple[str, ParamSite]]:
    """Every managed parameter below a module by qualified name, tied ones under each name."""
    by_registry = {
        (id(site.registry), site.key): site for unit in units_at_rest(module) for site in unit.sites
    }
    for path, child in module.named_modules(remove_duplicate=False):
        for key in child._parameters:
            site = by_registry.get((id(child._parameters), key))
            if site is not None:
                yield (f"{path}.{key}" if path else key), site
