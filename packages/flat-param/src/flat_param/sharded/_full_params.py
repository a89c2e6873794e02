"""Temporary full parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..buffers._views import param_views
from ._by_hand import units_at_rest
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
