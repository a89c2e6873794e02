"""Temporary full parameters, and the parameters of all units by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..buffers._views import param_views
from ._by_hand import units_at_rest
from ._param_sites import ParamSite
from ._sharded_params import ShardedParams


@contextmanager
def full_params(module: nn.Module, *, write_back: bool) -> Iterator[None]:
    """Context with full copies of the parameters of all units below a module. Collective.

    Raises:
        StateError: called during forward or backward, or inside another such context.
        ParameterError: one was replaced, and is to be written back.
    """
    units = units_at_rest(module, "whole_params")
    copies = {unit: {part: _copies_of(part) for part in unit.parts} for unit in units}
    try:
        for unit in units:
            unit.sites.copies = copies[unit]
            unit.sites.swap_out()
        yield
    finally:
        errors = [unit.sites.drop_copies() for unit in units]
    if write_back:
        for error in filter(None, errors):
            raise error
        for unit in units:
            for part, wholes in copies[unit].items():
                for index, whole in enumerate(wholes):
                    part.load_full(index, whole)
            unit.reshard()


def _copies_of(part: ShardedParams) -> tuple[nn.Parameter, ...]:
    """Gather the full parameters of a segment into new memory, in the shard's dtype. Collective."""
    full = torch.empty(part.plan.numel, dtype=part.shard.dtype, device=part.device)
    part.gather_into(full).wait()
    wholes = zip(param_views(full, part.segment.layout), part.held.params, strict=True)
    return tuple(
        nn.Parameter(part.placed(index, whole), requires_grad=param.requires_grad)
        for index, (whole, param) in enumerate(wholes)
    )


def named_sites(module: nn.Module) -> Iterator[tuple[str, ParamSite]]:
    """Yield every parameter of units below a module by qualified name, with all tied names."""
    by_registry = {
        (id(site.registry), site.key): site for unit in units_at_rest(module) for site in unit.sites
    }
    for path, child in module.named_modules(remove_duplicate=False):
        for key in child._parameters:
            site = by_registry.get((id(child._parameters), key))
            if site is not None:
                yield (f"{path}.{key}" if path else key), site
