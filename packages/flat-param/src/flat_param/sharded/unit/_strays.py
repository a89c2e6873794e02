"""Checks of registrations, in torch's public hooks.

- A trainable parameter that was added after `fully_shard` belongs to no unit. A forward looks for
  such parameters only if a module or a parameter was registered since the last one.
- DistributedDataParallel registers the module that it wraps before it communicates. If a sharded
  parameter is inside, at any depth, the registration raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..._errors import StateError
from ...buffers._dtensors import is_dtensor
from ..tensor._param_piece import piece_of
from ._unit import Unit

registrations = SimpleNamespace(count=0)
"""Counts the registrations of modules and parameters."""


@cache
def watch_registrations() -> None:
    """Count registrations of modules and parameters from now on, once."""
    register_module_module_registration_hook(_count)
    register_module_parameter_registration_hook(_count)


def _count(module: Any, name: str, registered: Any) -> None:
    is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
    is_wrapped = is_ddp and isinstance(registered, nn.Module)
    for path, param in registered.named_parameters() if is_wrapped else ():
        if piece_of(param) is not None and path not in module.parameters_to_ignore:
            raise StateError(
                f"flat_param.fully_shard: DistributedDataParallel is called with "
                f"{type(registered).__name__}, whose parameter '{path}' is sharded, but it would "
                "overwrite each rank's piece by that of rank 0. Leave DDP out, since backward "
                "reduces gradients already, and call fully_shard on the whole module. With "
                "accelerate and Trainer use their FSDP plugin with fsdp_version=2, or pass only "
                "the optimizer and the data to prepare() and save with save_sharded."
            )
    if not torch.compiler.is_compiling():  # traced, it would be compiled anew in each call
        registrations.count += 1


def check_strays(function: str, module: nn.Module, units: Iterable[Unit]) -> None:
    """Refuse a trainable parameter of a sharded module that belongs to none of the units.

    Frozen ones are allowed, like buffers.
    """
    units = list(units)
    if all(unit.comms.world_size == 1 for unit in units):
        return
    owned = {(id(site.registry), site.key) for unit in units for site in unit.sites}
    owned |= {place for unit in units for place in unit.ignored_places}
    for path, child in module.named_modules():
        for key, param in child._parameters.items():
            if param is None or not param.requires_grad:
                continue
            if (id(child._parameters), key) not in owned and not is_dtensor(param):
                name = f"{path}.{key}" if path else key
                raise StateError(
                    f"flat_param.{function}: parameter '{name}' was added after fully_shard and "
                    "belongs to no unit, so each rank would train its own. Add it before "
                    "fully_shard, or pass it in ignored_params and reduce its gradients yourself."
                )


def look_for_strays(unit: Unit, units: Iterable[Unit]) -> None:
    """Check before a forward of an outermost unit, after a registration."""
    now = registrations.count
    for module in unit.modules():
        check_strays("fully_shard", module, units)
    unit.looked_at = now
