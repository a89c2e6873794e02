"""Whole parameters for a while, and the plain module's state dict. Collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import ParameterError, StateError
from ..memory._views import param_views
from ._by_hand import put_to_rest, units_at_rest, units_below
from ._param_sites import ParamSite, wrong_shape
from ._sharded_params import HandsOut, ShardedParams, as_gathered
from ._unit import Unit


def gather_part(
    part: ShardedParams, *, shard: Tensor | None = None, hands_out: HandsOut = as_gathered
) -> tuple[Tensor, ...]:
    """Whole tensors of one segment, in new memory, in the shard's own dtype. Collective.

    Args:
        part: the segment.
        shard: what to gather in place of the parameters, such as a moment of the optimizer;
            `(shard_numel,)`.
        hands_out: what is kept.
    """
    dtype = part.shard.dtype if shard is None else shard.dtype
    full = torch.empty(part.plan.numel, dtype=dtype, device=part.device)
    part.gather_into(full, source=shard).wait()
    return param_views(hands_out(full), part.segment.layout)


def gather_unit(
    unit: Unit, *, hands_out: HandsOut = as_gathered
) -> dict[ShardedParams, tuple[Tensor, ...]]:
    """Whole tensors of every segment of a unit. Collective."""
    return {part: gather_part(part, hands_out=hands_out) for part in unit.parts}


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
        for part, wholes in gather_unit(unit).items()
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


def full_state(
    module: nn.Module, plain: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The plain module's state dict, with one unit's tensors made whole. Collective.

    Nested units come in through the recursion of `torch.nn.Module.state_dict`.
    """
    unit: Unit = module._flat_param  # type: ignore[assignment]  # set by fully_shard
    if unit.sites.shows_copies:
        return plain(*args, **kwargs)
    put_to_rest(unit)
    if unit.hands_out is None:
        return plain(*args, **kwargs)
    _refuse_inside_step([unit])
    wholes = gather_unit(unit, hands_out=unit.hands_out)
    try:
        for site in unit.sites:
            whole = wholes[site.part][site.index]
            placed = site.part.placed(site.index, whole)
            site.registry[site.key] = nn.Parameter(placed, requires_grad=False)
        state = plain(*args, **kwargs)
    finally:
        unit.sites.swap_out()
    return state


@contextmanager
def handing_out(module: nn.Module, hands_out: HandsOut | None) -> Iterator[None]:
    """Say what `state_dict()` of a module has of what it gathers; None: pieces, gathering none."""
    units = list(units_below(module))
    for unit in units:
        unit.hands_out = hands_out
    try:
        yield
    finally:
        for unit in units:
            unit.hands_out = as_gathered


def local_state(module: nn.Module, *, live: bool = True) -> dict[str, Any]:
    """What the plain state dict has and no unit, such as buffers. Not a collective.

    Args:
        module: sharded, or with units inside.
        live: buffers themselves, to be written to, where the state dict has others' dtypes.
    """
    managed = dict(named_sites(module))
    with handing_out(module, None):
        state = module.state_dict()
    buffers = dict(module.named_buffers(remove_duplicate=False)) if live else {}
    return {k: buffers.get(k, value) for k, value in state.items() if k not in managed}


def load_full_state(
    module: nn.Module,
    plain: Callable[..., Any],
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
) -> Any:
    """Load a plain state dict: every rank copies its part. Not a collective.

    All shapes are checked before anything is written.

    Raises:
        ParameterError: a tensor does not have its parameter's whole shape.
    """
    managed = dict(named_sites(module))
    for name, site in managed.items():
        if name in state_dict:
            _check_shape(name, site, state_dict[name])
    # Where a key is managed, torch is given what is already there: it then reports missing and
    # unexpected keys in its own words, and copies nothing of consequence.
    present = {name: managed[name].part.params[managed[name].index] for name in managed}
    rest = {name: present.get(name, value) for name, value in state_dict.items()}
    result = plain(rest, strict=strict)
    for name, site in managed.items():
        if name in state_dict:
            site.part.load_full(site.index, state_dict[name])
    for unit in units_below(module):
        unit.reshard()
    return result


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


def _check_shape(name: str, site: ParamSite, value: Tensor) -> None:
    shape = site.part.pieces[site.index].spec.shape
    if tuple(site.part.local_of_value(site.index, value).shape) != shape:
        raise ParameterError(
            f"flat_param.load_state_dict: parameter '{name}' has shape {tuple(value.shape)} in "
            f"the state dict, but the module's has {shape}. Load a whole, matching state dict."
        )
