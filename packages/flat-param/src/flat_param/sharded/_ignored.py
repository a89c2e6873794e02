"""Parameters that a unit leaves alone: its user's own, on every rank.

Rule 1: they are not cut, gathered, moved, initialised, broadcast or cast, and nobody sums their
        gradients. What the plain module does with them happens.
Rule 2: a unit around another leaves alone what that one does, without being told again.
Rule 3: whole parameters may be read on the way to the gradient of one of these alone. So a unit
        that has run waits for these, too, before it frees its own (Rule 1 in _unit.py).
Rule 4: such a gradient may come in a backward that is none of the unit's, as of a loss of that
        parameter alone. It begins no pass: other ranks may have no such loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import nn

from .._errors import ParameterError
from ..buffers._owners import FLATTENED, IGNORED, UNIT, Owner, check_not_inside, check_owners


def find_ignored(
    module: nn.Module,
    given: Iterable[object],
    *,
    owned: Iterable[nn.Parameter],
    nested: Iterable[nn.Parameter],
) -> tuple[nn.Parameter, ...]:
    """All parameters below a module that its unit is to leave alone.

    Args:
        module: which is to be a unit.
        given: what the user has passed; parameters of others are passed over.
        owned: what units below it have divided.
        nested: what these leave alone (Rule 2).

    Raises:
        ParameterError: something given is no parameter, or a unit has divided it; or one that a
            nested unit leaves alone is registered outside of that, too.
    """
    names = {param: name for name, param in module.named_parameters()}
    found = dict.fromkeys(param for param in given if _is_of_module(param, names))
    named = [(names[param], param) for param in found]
    check_not_inside(module, named)
    check_owners("fully_shard", module, named, (UNIT, FLATTENED))
    divided = dict.fromkeys(owned)
    for param in found:
        if param in divided:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{names[param]}' is in ignored_params, but a "
                "unit inside has sharded it already. Pass it to fully_shard of that unit, too."
            )
    others = [param for param in dict.fromkeys(nested) if param not in found]
    _check_nested(module, others)
    return (*found, *others)


def _is_of_module(param: object, names: Mapping[nn.Parameter, str]) -> TypeGuard[nn.Parameter]:
    """Whether it is a parameter that is asked about here: one set may do for all units."""
    if not isinstance(param, nn.Parameter):
        raise ParameterError(
            f"flat_param.fully_shard: ignored_params has a {type(param).__name__}, but it must be "
            "a set of parameters. Pass a set of some of model.parameters()."
        )
    return param in names


def _check_nested(module: nn.Module, nested: Sequence[nn.Parameter]) -> None:
    """Refuse what a nested unit leaves alone and this one would divide."""
    known = {id(param) for param in nested}
    inside = [f"{name}." for name, child in module.named_modules() if hasattr(child, "_flat_param")]
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in known and not any(name.startswith(prefix) for prefix in inside):
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' is tied to one that a unit inside "
                "ignores, but this unit would shard it. Pass it in ignored_params here, too."
            )


def own_ignored(module: nn.Module, params: Iterable[nn.Parameter]) -> Owner:
    """Let units beside the module find what it leaves alone, as long as this is kept."""
    known = {id(param) for param in params}
    named = module.named_parameters(remove_duplicate=False)
    return Owner(IGNORED, module, [pair for pair in named if id(pair[1]) in known])


@contextmanager
def set_aside(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Have others on meta in their place, for modules that are about to be initialised (Rule 1)."""
    known = {id(param) for param in params}
    places = [
        (module._parameters, key, param)
        for module in modules
        for key, param in module._parameters.items()
        if param is not None and id(param) in known
    ]
    for registry, key, param in places:
        stand_in = torch.empty_like(param, device="meta")
        registry[key] = nn.Parameter(stand_in, requires_grad=param.requires_grad)
    try:
        yield
    finally:
        for registry, key, param in places:
            registry[key] = param
