"""Ignored parameters: every rank keeps them as in the plain module.

- They are not sharded, gathered, moved, initialised or cast, and their gradients are not reduced.
  An outer unit also ignores the parameters that an inner unit ignores.
- The gradient of an ignored parameter may depend on unsharded parameters, so a unit waits for it
  before resharding. It may belong to a backward of another loss, which other ranks may not run, so
  it starts no backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ..._errors import ParameterError
from ..tensor._param_piece import piece_of


def find_ignored(
    module: nn.Module, given: object, *, nested: Iterable[nn.Parameter]
) -> tuple[nn.Parameter, ...]:
    """All parameters below a module that its unit ignores.

    Args:
        module: the module that becomes a unit.
        given: the argument `ignored_params`; parameters of other modules are skipped.
        nested: parameters that inner units ignore.
    """
    names = {param: name for name, param in module.named_parameters()}
    found: dict[nn.Parameter, None] = {}
    for param in given if isinstance(given, Iterable) else [given]:
        if not isinstance(param, nn.Parameter):
            raise ParameterError(
                f"flat_param.fully_shard: ignored_params has a {type(param).__name__}, but it must "
                "be a set of parameters. Pass a set of some of model.parameters()."
            )
        if param in names:  # users may pass one set to all units
            found[param] = None
    for param in found:
        if piece_of(param) is not None:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{names[param]}' is in ignored_params, but "
                "another unit has sharded it already. Pass it to fully_shard of that unit, too."
            )
    others = [param for param in dict.fromkeys(nested) if param not in found]
    for name, _ in outside_units(module, others):
        raise ParameterError(
            f"flat_param.fully_shard: parameter '{name}' is tied to one that a unit inside "
            "ignores, but this unit would shard it. Pass it in ignored_params here, too."
        )
    return (*found, *others)


def outside_units(
    module: nn.Module, params: Iterable[nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter]]:
    """The `params` that are registered in a module outside of its inner units."""
    known = {id(param) for param in params}
    modules = module.named_modules()
    inside = tuple([f"{name}." for name, child in modules if hasattr(child, "_flat_param")])
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in known and not name.startswith(inside):
            yield name, param
